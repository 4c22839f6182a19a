"""Keys of chains, for tests in which the tokens do not matter."""

from __future__ import annotations

import hashlib

KEY_BYTES = 16


def chain_of(name: object, blocks: int = 1, after: bytes = b"") -> bytes:
    """The packed keys of a chain, the same in every process, after those of another.

    Chains of two names share no key, and a shorter one is where the longer one of its name begins.
    """
    keys, last = [], after[-KEY_BYTES:]
    for number in range(blocks):
        last = hashlib.blake2b(last + f"{name}/{number}".encode(), digest_size=KEY_BYTES).digest()
        keys.append(last)
    return after + b"".join(keys)


def key_of(keys: bytes, number: int) -> bytes:
    """Key `number` of packed keys."""
    return keys[number * KEY_BYTES : (number + 1) * KEY_BYTES]
