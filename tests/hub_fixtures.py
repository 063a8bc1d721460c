"""The `hub` fixture: a fresh test Hub, and this process's huggingface_hub pointed at it.

A folder's conftest.py takes it with `from tests.hub_fixtures import hub  # noqa: F401`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hub_server import HubServer


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A running server; the environment and huggingface_hub's constants name it."""
    from huggingface_hub import constants

    with HubServer() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        # The constants were read from the environment when the library was imported.
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server
