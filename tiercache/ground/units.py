"""Sizes and durations as people write them, and back.

>>> parse_bytes("16GiB"), parse_duration_s("250ms")
(17179869184, 0.25)
>>> format_bytes(17179869184)
'16.0 GiB'
"""

from __future__ import annotations

import re

HUGE_PAGE_BYTES = 2 << 20

_BYTES = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "kib": 1 << 10,
    "kb": 10**3,
    "m": 1 << 20,
    "mib": 1 << 20,
    "mb": 10**6,
    "g": 1 << 30,
    "gib": 1 << 30,
    "gb": 10**9,
    "t": 1 << 40,
    "tib": 1 << 40,
    "tb": 10**12,
}
_SECONDS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
BYTES_PATTERN = r"^ *[0-9]+(\.[0-9]+)? *([kKmMgGtT]([iI]?[bB])?|[bB])? *$"
"""The input of `parse_bytes`, as a regular expression of JSON Schema."""
DURATION_PATTERN = r"^ *[0-9]+(\.[0-9]+)? *(us|ms|s|m|min|h|d)? *$"
"""The input of `parse_duration_s`, likewise."""


def _parse(text: str | int | float, table: dict[str, float] | dict[str, int], example: str) -> float:
    match = _NUMBER.fullmatch(str(text))
    if match is None or match[2].lower() not in table:
        raise ValueError(f"{text!r} is not understood: write for example {example}")
    return float(match[1]) * table[match[2].lower()]


def parse_bytes(text: str | int) -> int:
    """`"16GiB"`, `"512 MB"`, `"4096"` or an int, as a number of bytes. Raises ValueError."""
    return int(_parse(text, _BYTES, "16GiB, 512MB or 4096"))


def parse_duration_s(text: str | float) -> float:
    """`"250ms"`, `"20s"`, `"5min"` or a number of seconds, as seconds. Raises ValueError."""
    return _parse(text, _SECONDS, "250ms, 20s or 5min")


def format_bytes(count: float) -> str:
    """A number of bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_duration(seconds: float) -> str:
    """A duration for people: `12 us`, `3.4 ms`, `1.25 s`, `4.0 min`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


_QUANTITIES = re.compile(r"(?<![\w./:-])\d+(?:\.\d+)?(?= ?(?:ns|us|µs|ms|s|min|h|d|%|[KMGTP]?i?B)(?!\w)| [a-z]{3,})")


def without_quantities(text: str) -> str:
    """A text with N for each duration, size and count: the same for one cause however long it lasts.

    Numbers in names, paths and addresses stay, and those that are names themselves (`status 1`, `HTTP 503`).
    """
    return _QUANTITIES.sub("N", text)
