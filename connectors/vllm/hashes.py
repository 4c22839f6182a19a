"""vLLM's own block hashes, computed without vLLM: for queries about how much of a prompt is stored.

    hash_0 = the seed's hash;  hash_i = sha256(encode((hash_(i-1), tokens of block i, extras)))

`encode` is Python's pickle (protocol 5, which every Python writes alike for these types) or canonical CBOR
(RFC 8949). The seed is a constant, or PYTHONHASHSEED where that is set. Only token ids, an adapter and a
`cache_salt` are known here: prompts with images have other hashes.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_SEED = "vllm-none-hash"
_HEADS = ((0xFF, 0x18, 1), (0xFFFF, 0x19, 2), (0xFFFFFFFF, 0x1A, 4), (0xFFFFFFFFFFFFFFFF, 0x1B, 8))


def _cbor_head(major: int, value: int) -> bytes:
    """Major type and argument, in the shortest form."""
    if value < 24:
        return bytes([major << 5 | value])
    _, code, size = next(head for head in _HEADS if value <= head[0])
    return bytes([major << 5 | code]) + value.to_bytes(size, "big")


def _cbor(value: Any) -> bytes:
    """Encode the values that a block's hash is made of."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _cbor_head(0, value)
    if isinstance(value, bytes):
        return _cbor_head(2, len(value)) + value
    if isinstance(value, str):
        return _cbor_head(3, len(value.encode())) + value.encode()
    return _cbor_head(4, len(value)) + b"".join(map(_cbor, value))


def _pickle(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


ENCODINGS: Mapping[str, Callable[[Any], bytes]] = {"sha256": _pickle, "sha256_cbor": _cbor}
"""vLLM's `prefix_caching_hash_algo` -> the encoding that is hashed."""


def hash_seed(algorithm: str, environ: Mapping[str, str] = os.environ) -> bytes:
    """What an engine started in this environment hashes before its first block."""
    return hashlib.sha256(ENCODINGS[algorithm](environ.get("PYTHONHASHSEED", _SEED))).digest()


def block_hashes(
    algorithm: str,
    seed: bytes,
    tokens: Sequence[int],
    size: int,
    adapter: tuple[str, str] | None = None,
    cache_salt: str = "",
) -> list[bytes]:
    """The hashes of all full blocks of `size` tokens.

    `adapter` is the name and path of a LoRA adapter, `cache_salt` that of the request.
    """
    encode, sha256 = ENCODINGS[algorithm], hashlib.sha256
    always = () if adapter is None else (("lora", *adapter),)
    last, hashes = seed, []
    for start in range(0, len(tokens) - size + 1, size):
        extras = (*always, ("cache_salt", cache_salt)) if cache_salt and not start else always
        last = sha256(encode((last, tuple(tokens[start : start + size]), extras or None))).digest()
        hashes.append(last)
    return hashes
