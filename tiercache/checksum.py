"""Checksums of stored blocks: they prove the bytes, and whose bytes they are.

The checksum of a block is seeded with everything that its index row claims of it (key, namespace,
length, codec, kind of checksum). So not only a flipped bit or a torn write fails it, but also the
right bytes under a wrong row: a slot that was reused, a row whose codec or length was damaged.
It is no defence against someone who forges blocks on purpose; file modes are.
"""

from __future__ import annotations

import struct

import xxhash

CHECKSUM_XXH3 = 1
"""The kind `xxh3_64`, seeded. Rows carry the kind; kinds are never renumbered."""
_FIELDS = struct.Struct("<HHQII")


def block_seed(key: bytes, namespace_fingerprint: str, length: int, codec: int, kind: int = CHECKSUM_XXH3) -> int:
    """The 64-bit seed for the checksum of one block.

    Args:
        key: the block's 16 bytes.
        namespace_fingerprint: `NamespaceSpec.fingerprint()`; numbers of namespaces are not stable.
        length: bytes of the block as the client stored it.
        codec: how it is stored (`tiercache.daemon.nvme.codecs`); 0 is as it is.
        kind: which checksum this is the seed for.
    """
    fingerprint = namespace_fingerprint.encode()
    fields = _FIELDS.pack(len(key), len(fingerprint), length, codec, kind)
    return xxhash.xxh3_64_intdigest(fields + key + fingerprint)


def block_checksum(view: bytes | memoryview, seed: int) -> int:
    """xxh3_64 over the stored bytes (exact length, no padding), as an unsigned 64-bit integer.

    Releases the interpreter's lock from about 100 KB on. 10 GB/s per core on cold data, 30 in cache.
    """
    return xxhash.xxh3_64_intdigest(view, seed)
