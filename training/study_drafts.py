"""Drafts of registrations in a study, and the files that come of them."""

import json
from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Draft:
    """A registration's draft, and what comes of it in the study's folder."""

    path: Path
    out: Path
    number: int

    def _file(self, stem: str) -> Path:
        return self.out / (f"{stem}.json" if self.number == 1 else f"{stem}_{self.number}.json")

    @property
    def registration(self) -> Path:
        """The registered draft."""
        return self._file("registration")

    @property
    def confirmation(self) -> Path:
        """Its verdicts."""
        return self._file("confirmation")

    def check(self) -> None:
        """See that the draft is still what was registered.

        Raises:
            ValueError: if it was changed since.
        """
        draft = yaml.safe_load(self.path.read_text())
        registered = json.loads(self.registration.read_text())
        for one in registered["contrasts"]:
            one.pop("bounds", None)
        for key in ("title", "set_name", "format", "bootstrap", "contrasts", "rules"):
            if (draft.get(key) or []) != registered[key]:
                raise ValueError(
                    f"{self.path}: {key} differs from what was registered in {self.registration}. "
                    "Put it back. What is to be confirmed later, a new arm say, stands in a draft "
                    "of its own, named behind the first in the study's `registration: [...]`."
                )


def arms_of(draft: Path) -> set[tuple[str, int]]:
    """Arms and seeds that a draft wants scored.

    Raises:
        ValueError: if it is no draft.
    """
    try:
        content = yaml.safe_load(draft.read_text())
        contrasts, also = content["contrasts"], content.get("also_scored") or {}
        named = {
            (one[side], seed)
            for one in contrasts
            for side in ("arm", "baseline")
            for seed in one["seeds"]
        }
        return named | {(arm, seed) for arm, seeds in also.items() for seed in seeds}
    except (OSError, yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{draft} must be a registration's draft, as evaluation/example_registration.yaml is: "
            f"{error!r}"
        ) from None
