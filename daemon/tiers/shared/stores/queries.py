"""The part behind the question mark in a store's URL: a table of what may stand there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from tiercache.errors import ConfigError


def read_query(address: str, query: str, known: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """The settings in a query. Raises ConfigError; `known` says how each is read, which may raise ValueError."""
    found: dict[str, Any] = {}
    for key, text in parse_qsl(query, keep_blank_values=True):
        if key not in known:
            raise ConfigError(f"{address}: {key!r} is not a setting of this store: write {', '.join(known)}")
        if key in found:
            raise ConfigError(f"{address}: {key} stands there twice: write it once")
        try:
            found[key] = known[key](text)
        except ValueError as error:
            raise ConfigError(f"{address}: {key} = {text}: {error}") from None
    return found


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """Reads a whole number within bounds."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and low <= int(text) <= high):
            raise ValueError(f"must be a whole number from {low} to {high}")
        return int(text)

    return read


def yes_or_no(text: str) -> bool:
    """Reads a switch."""
    if text not in ("yes", "no"):
        raise ValueError("must be yes or no")
    return text == "yes"
