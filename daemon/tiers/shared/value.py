"""The form of a block in a shared store, and how its bytes are proved on the way back.

    value    header 96 │ body
    sealed   body = nonce 12 │ ciphertext │ tag 16         AES-256-GCM; the tag covers header and key too
    plain    body = the block, raw or compressed           the checksum is seeded with header and key

A store may return anything: bytes of another block, of an earlier epoch, cut, changed, or forged. A checksum finds all
of these except forged ones; only a sealed value is safe from a stranger who can write to the store. Nothing of a value
reaches a client before it is proved, and a value that fails is a miss.
"""

from __future__ import annotations

import struct
from functools import lru_cache

from tiercache.daemon.tiers.dram.source import FetchOutcome
from tiercache.daemon.tiers.forms import codecs
from tiercache.daemon.tiers.forms.cipher import OVERHEAD_BYTES, Cipher, CipherError
from tiercache.protocol.checksums import CHECKSUM_XXH3, block_checksum, block_seed

from .memory import address_of
from .naming import BlockIdentity

MAGIC = b"tcKV"
VERSION = 1
"""Of the header's fields: the byte behind MAGIC. A header of another length needs other names too (`naming`)."""
_HEADER = struct.Struct("<4sBBBxQQQ16s16s16s16x")
HEADER_BYTES = _HEADER.size
assert HEADER_BYTES == 96
_SEALED = 0  # in the place of a kind of checksum: the tag of the cipher is one


PACK_BYTES = 32 << 20
"""The largest pack, unless one block is larger: more bytes in one request are not faster, only more to hold."""


@lru_cache(maxsize=1024)
def pack_of(block_bytes: int, most: int) -> int:
    """How many blocks are one value, where a store has at most that many in one.

    It divides `most`, so that a multiple of `most` ends a pack whatever the length of blocks.
    """
    return max(one for one in range(1, most + 1) if most % one == 0 and (one == 1 or one * block_bytes <= PACK_BYTES))


def announced_bytes(header: bytes) -> int:
    """The length of the body that a header announces; 0 for what is not a header."""
    if len(header) != HEADER_BYTES or header[: len(MAGIC)] != MAGIC:
        return 0
    length: int = _HEADER.unpack(header)[5]
    return length


class ValueForm:
    """Makes values and proves them. Any thread; blocks for the time of a checksum or of the encryption.

    cipher: None for plain values; codec: see `codecs.codec_number`.
    """

    def __init__(self, cipher: Cipher | None, codec: int = codecs.RAW) -> None:
        self._cipher = cipher
        self._codec = codec

    @property
    def sealed(self) -> bool:
        """True if values are encrypted."""
        return self._cipher is not None

    def body_bytes(self, block_bytes: int) -> int:
        """The longest body of a block of that size."""
        return block_bytes + (OVERHEAD_BYTES if self._cipher is not None else 0)

    def pack(self, whose: BlockIdentity, block: memoryview, scratch: memoryview) -> tuple[bytes, memoryview | bytes]:
        """Header and body of a value. The body is the block itself, or lies in `scratch` (`body_bytes` long)."""
        encoded = codecs.encode(self._codec, block)
        plain: memoryview | bytes = block if encoded is None else encoded
        codec = codecs.RAW if encoded is None else self._codec
        if self._cipher is None:
            seed = _seed(whose, codec)
            return _header(whose, codec, CHECKSUM_XXH3, len(plain), block_checksum(plain, seed)), plain
        body = scratch[: len(plain) + OVERHEAD_BYTES]
        header = _header(whose, codec, _SEALED, len(body), 0)
        self._cipher.seal(plain, header + whose.key, body)
        return header, body

    def unpack(self, whose: BlockIdentity, header: bytes, body: memoryview, frame: memoryview) -> FetchOutcome:
        """Prove a value and write its block to `frame`, which may be where `body` begins.

        Returns OK; OTHER_VERSION for a header that begins as one of another release; or CORRUPT. Unless it is OK,
        `frame` holds undefined bytes. Sealed and plain values have different names, so a value of one kind under a
        name of the other was forged.
        """
        if header[: len(MAGIC)] == MAGIC and header[len(MAGIC)] != VERSION:
            return FetchOutcome.OTHER_VERSION
        magic, version, codec, kind, block_bytes, body_bytes, checksum, mark, fingerprint, epoch = _HEADER.unpack(
            header
        )
        told = magic, version, block_bytes, body_bytes, mark, fingerprint, epoch
        expected = MAGIC, VERSION, whose.block_bytes, len(body), whose.mark, _packed(whose.fingerprint), whose.epoch
        if told != expected or len(frame) != whose.block_bytes or not codecs.known(codec) or codec & codecs.SEALED:
            return FetchOutcome.CORRUPT
        if (kind == _SEALED) is not (self._cipher is not None):
            return FetchOutcome.CORRUPT
        if self._cipher is not None:
            return self._unseal(whose, header, codec, body, frame)
        if kind != CHECKSUM_XXH3 or block_checksum(body, _seed(whose, codec)) != checksum:
            return FetchOutcome.CORRUPT
        if codec == codecs.RAW:
            if len(body) != len(frame):
                return FetchOutcome.CORRUPT
            if not _same_place(body, frame):
                frame[:] = body
            return FetchOutcome.OK
        return _decode(codec, memoryview(bytes(body)), frame)

    def _unseal(
        self, whose: BlockIdentity, header: bytes, codec: int, body: memoryview, frame: memoryview
    ) -> FetchOutcome:
        assert self._cipher is not None
        length = len(body) - OVERHEAD_BYTES
        if length < 0 or (length != len(frame) if codec == codecs.RAW else length > len(frame)):
            return FetchOutcome.CORRUPT
        plain = frame if codec == codecs.RAW else memoryview(bytearray(length))
        try:
            self._cipher.open(body, header + whose.key, plain)
        except CipherError:
            return FetchOutcome.CORRUPT
        return FetchOutcome.OK if codec == codecs.RAW else _decode(codec, plain, frame)


def _decode(codec: int, stored: memoryview, frame: memoryview) -> FetchOutcome:
    try:
        codecs.decode(codec, stored, frame)
    except codecs.CodecError:
        return FetchOutcome.CORRUPT
    return FetchOutcome.OK


def _header(whose: BlockIdentity, codec: int, kind: int, body_bytes: int, checksum: int) -> bytes:
    return _HEADER.pack(
        MAGIC,
        VERSION,
        codec,
        kind,
        whose.block_bytes,
        body_bytes,
        checksum,
        whose.mark,
        _packed(whose.fingerprint),
        whose.epoch,
    )


def _packed(fingerprint: str) -> bytes:
    return bytes.fromhex(fingerprint)


def _seed(whose: BlockIdentity, codec: int) -> int:
    return block_seed(whose.key + whose.epoch, whose.fingerprint, whose.block_bytes, codec)


def _same_place(one: memoryview, other: memoryview) -> bool:
    return address_of(one) == address_of(other)
