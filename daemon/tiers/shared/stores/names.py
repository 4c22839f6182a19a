"""Names of values as names of files and objects: the same for a value on every host, and safe everywhere."""

from __future__ import annotations

import hashlib

_LONGEST = 200
"""File systems allow 255 bytes."""
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


def file_name(name: bytes) -> str:
    """A name without slashes, colons and leading dots. No two names of values give the same one."""
    text = "".join(_written(byte, first=at == 0) for at, byte in enumerate(name))
    return text if 0 < len(text) <= _LONGEST else f"={hashlib.blake2b(name, digest_size=24).hexdigest()}"


def _written(byte: int, first: bool) -> str:
    if byte in _PLAIN or (byte == ord(".") and not first):
        return chr(byte)
    return "+" if byte == ord(":") else f"%{byte:02X}"


def fan_out(name: bytes) -> str:
    """Which of 4,096 folders a value belongs in."""
    return hashlib.blake2b(name, digest_size=2).hexdigest()[:3]
