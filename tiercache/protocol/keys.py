"""Prefix hashes: the names of blocks.

    h_0 = salted_root(content_id(what the model computes), tenant salt)
    h_i = blake2b-128(h_(i-1) || tokens of block i as u32le || extra)

So a key names its block *and* everything before it. It depends on nothing of the process, the machine or the
environment, and the same chain serves all ranks and groups of a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tiercache.protocol.messages import KEY_BYTES, EventRun

Tokens = Sequence[int] | npt.NDArray[np.integer]


def content_id(model: str, *, epoch: int = 0, extra: Iterable[tuple[str, str]] = ()) -> bytes:
    """The 16 bytes that identify what computes a chain, for all tenants: not secret, and no root without a salt.

    Args:
        model: what the model computes: the hash of its weights and config, or a revision that
            pins them; never only its name. See `fingerprint_files`.
        epoch: raised when the weights change in place or the cache is reset.
        extra: further things that change KV values (adapter content, config overrides), as pairs;
            their order does not matter.
    """
    fields = msgspec.msgpack.encode([model, epoch, sorted(extra)])
    return hashlib.blake2b(fields, digest_size=KEY_BYTES, person=b"tiercache-model").digest()


def salted_root(content: bytes, salt: str | bytes) -> bytes:
    """The 16 bytes that a tenant's chains start from.

    Args:
        content: identifies what computes them, from `content_id`.
        salt: secret of a tenant, perhaps empty. Chains with different salts never meet.
    """
    secret = salt.encode() if isinstance(salt, str) else salt
    fields = msgspec.msgpack.encode([content, secret])
    return hashlib.blake2b(fields, digest_size=KEY_BYTES, person=b"tiercache-root").digest()


def root_key(model: str, *, salt: str | bytes = b"", epoch: int = 0, extra: Iterable[tuple[str, str]] = ()) -> bytes:
    """The 16 bytes that a chain starts from: `content_id` of what computes it, under a tenant's `salt`."""
    return salted_root(content_id(model, epoch=epoch, extra=extra), salt)


def fingerprint_files(paths: Iterable[str | Path]) -> str:
    """A hash of the content of files (weights, config), independent of the name of their folder.

    Reads every byte: at memory or disk speed, and it may block for as long.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"tiercache-files")
    for path in sorted(map(Path, paths), key=lambda path: path.name):
        content = xxhash.xxh3_128()
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(4 << 20):
                content.update(chunk)
        digest.update(msgspec.msgpack.encode([path.name, content.digest()]))
    return digest.hexdigest()


def _token_bytes(tokens: Tokens) -> bytes:
    values = np.asarray(tokens)
    if values.size and (values.dtype.kind not in "iu" or values.min() < 0 or values.max() > 0xFFFFFFFF):
        raise ValueError("token ids must be integers from 0 to 4294967295")
    return values.astype("<u4", copy=False).tobytes()


def name_blocks(keys: bytes, first: int, tokens: Tokens) -> EventRun:
    """What KV events say of blocks `first..` of a chain, for engines without hashes of their own.

    Args:
        keys: of the chain, from the root to the last of the blocks.
        first: the first of the blocks; its hash and those after it are the low 64 bits of their keys.
        tokens: of these blocks, and no others.
    """
    begins = range(max(0, first - 1) * KEY_BYTES, len(keys), KEY_BYTES)
    hashes: list[int | bytes] = [int.from_bytes(keys[at + KEY_BYTES - 8 : at + KEY_BYTES], "big") for at in begins]
    parent = hashes.pop(0) if first else None
    return EventRun(hashes, parent, _token_bytes(tokens))


class KeyChain:
    """The keys of one growing token sequence; only full blocks have one.

    >>> chain = KeyChain(root_key("demo"), block_size=4)
    >>> chain.extend([1, 2, 3, 4, 5])
    1
    >>> chain.extend([6, 7, 8]), len(chain.packed()) // 16
    (1, 2)
    """

    def __init__(self, root: bytes, block_size: int, tokens: Tokens = ()) -> None:
        if len(root) != KEY_BYTES or block_size < 1:
            raise ValueError(f"a root is {KEY_BYTES} bytes and a block at least 1 token")
        self.root = root
        self.block_size = block_size
        self._last = root
        self._tail = b""
        self._packed = bytearray()
        self._tokens = bytearray()
        self._extras: dict[int, bytes] = {}  # of blocks that have any
        self.extend(tokens)

    def __len__(self) -> int:
        """Number of full blocks so far."""
        return len(self._packed) // KEY_BYTES

    def extend(self, tokens: Tokens, extra: bytes = b"") -> int:
        """Append tokens; returns how many blocks became full.

        `extra` is hashed into every block that this call completes (for content that the token
        ids do not name, such as images behind placeholder tokens).
        """
        data = self._tail + _token_bytes(tokens)
        step = self.block_size * 4
        whole = len(data) - len(data) % step
        blake2b, last = hashlib.blake2b, self._last
        new = []
        for start in range(0, whole, step):
            last = blake2b(last + data[start : start + step] + extra, digest_size=KEY_BYTES).digest()
            new.append(last)
        if extra:
            self._extras.update(dict.fromkeys(range(len(self), len(self) + len(new)), extra))
        self._tokens += data[:whole]
        self._last = last
        self._tail = data[whole:]
        self._packed += b"".join(new)
        return len(new)

    def packed(self, blocks: int | None = None) -> bytes:
        """The keys of the first `blocks` full blocks (all by default), 16 bytes each."""
        end = len(self._packed) if blocks is None else blocks * KEY_BYTES
        return bytes(self._packed[:end])

    def events(self, first: int, count: int) -> EventRun:
        """What KV events say of blocks `first ..< first + count`: see `name_blocks`, and `extra` in hexadecimal."""
        end, size = first + count, 4 * self.block_size
        tokens = np.frombuffer(self._tokens[first * size : end * size], "<u4")
        run = name_blocks(self.packed(end), first, tokens)
        extras = [[self._extras[at].hex()] if at in self._extras else None for at in range(first, end)]
        return msgspec.structs.replace(run, extra_keys=extras) if any(extras) else run

    def key(self, index: int) -> bytes:
        """The key of block `index`; the root for index -1."""
        if index == -1:
            return self.root
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        return bytes(self._packed[index * KEY_BYTES : (index + 1) * KEY_BYTES])
