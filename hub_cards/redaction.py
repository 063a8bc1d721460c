"""Tokens stay out of files, logs and errors."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import get_token

_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}\b|(?<=[Bb]earer )\S+")


def scrub(text: str) -> str:
    """The text without anything that is, or looks like, a token of the Hub."""
    token = get_token()
    if token:
        text = text.replace(token, "hf_***")
    return _TOKEN.sub("hf_***", text)


def check_no_token(path: Path, name: str) -> None:
    """Refuse a file that holds a token.

    Raises:
        ValueError: naming the file, and never the token.
    """
    content = path.read_bytes()
    token = (get_token() or "").encode()
    found = re.search(rb"\bhf_[A-Za-z0-9]{30,}\b", content)
    if found or (len(token) >= 8 and token in content):
        raise ValueError(
            f"{name} must hold no token of the Hub; it does. Remove it, and revoke it."
        )
