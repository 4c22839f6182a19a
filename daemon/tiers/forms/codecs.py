"""Lossless codecs for blocks on a slow disk, over byte planes.

In KV values of two bytes the high bytes repeat (sign and exponent: about three bits each) and the low ones are noise,
so a block is split first into all first bytes, all second bytes and so on; a plane that does not shrink is kept raw:

    u32le length of each plane as stored │ the planes │ the remainder of a length that does not divide

A codec is one number in the row of a block: the algorithm in the low 3 bits, then a bit for encryption of the result
(see `cipher.py`), and the bytes of an element in the 4 bits above. `RAW` is 0. The libraries are loaded when a codec is
first used.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from tiercache.errors import ConfigError
from tiercache.ground.units import round_up

RAW = 0
_LZ4, _ZSTD = 1, 2
_ALGORITHM = 7
SEALED = 8
_ALGORITHMS = {"lz4": _LZ4, "zstd": _ZSTD}
_PAGE_BYTES = 4096
_ZSTD_LEVEL = 1
NAMES = ("raw", *_ALGORITHMS)
ELEMENT_BYTES = (1, 2, 4, 8)


class CodecError(ValueError):
    """Stored bytes that our encoder did not make, or whose library is missing."""


class _Library(NamedTuple):
    compress: Callable[[Any], bytes]
    decompress: Callable[[bytes | memoryview, int], bytes]
    """Returns exactly as many bytes as asked for, or raises CodecError. Never allocates more than that."""


def codec_number(name: str, element_bytes: int = 2) -> int:
    """The number that rows carry. Raises ConfigError for an unknown codec or a missing library."""
    if name not in NAMES:
        raise ConfigError(f"codec {name!r} is not known: choose one of {', '.join(NAMES)}")
    if element_bytes not in ELEMENT_BYTES:
        raise ConfigError(f"codec {name!r} cannot split elements of {element_bytes} bytes: 1, 2, 4 or 8")
    if name == "raw":
        return RAW
    _library(_ALGORITHMS[name])
    return _ALGORITHMS[name] | element_bytes << 4


def codec_name(codec: int) -> str:
    """The name of a known codec number."""
    return NAMES[codec & _ALGORITHM]


def unsealed(codec: int) -> int:
    """The codec below the encryption, if any."""
    return codec & ~SEALED


def known(codec: int) -> bool:
    """True if this version can decode blocks of that number (given its library)."""
    plain = unsealed(codec)
    return plain == RAW or (plain & _ALGORITHM in (_LZ4, _ZSTD) and plain >> 4 in ELEMENT_BYTES)


def element_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype as torch names it; 1 for a name that says nothing."""
    for digits, size in (("64", 8), ("32", 4), ("16", 2)):
        if digits in dtype:
            return size
    return 1


def encode(codec: int, view: memoryview) -> bytes | None:
    """The block made smaller, or None if that saves no page of 4096 (then store it raw)."""
    if codec == RAW:
        return None
    import numpy

    library, element = _library(codec & _ALGORITHM), codec >> 4
    whole = len(view) - len(view) % element
    elements = numpy.frombuffer(view, numpy.uint8, whole).reshape(-1, element)
    lengths, planes = [], []
    for number in range(element):
        plane = numpy.ascontiguousarray(elements[:, number]).data
        packed: bytes | memoryview = library.compress(plane) if len(plane) else b""
        if len(packed) >= len(plane):
            packed = plane
        lengths.append(len(packed))
        planes.append(packed)
    encoded = b"".join([struct.pack(f"<{element}I", *lengths), *planes, view[whole:]])
    return encoded if round_up(len(encoded), _PAGE_BYTES) < round_up(len(view), _PAGE_BYTES) else None


def decode(codec: int, stored: memoryview, out: memoryview) -> None:
    """Fill `out` (its length is the block's) from the output of `encode`. Raises CodecError.

    Never writes outside `out` nor takes more memory than a block's, whatever `stored` is.
    """
    if not known(codec) or codec & SEALED:
        raise CodecError(f"codec {codec} is not known")
    if codec == RAW:
        if len(stored) != len(out):
            raise CodecError(f"{len(stored)} raw bytes for a block of {len(out)}")
        out[:] = stored
        return
    import numpy

    try:
        library, element = _library(codec & _ALGORITHM), codec >> 4
    except ConfigError as error:  # stored by an earlier life that had the library
        raise CodecError(str(error)) from error
    rows, rest = divmod(len(out), element)
    header = 4 * element
    if len(stored) < header:
        raise CodecError(f"{len(stored)} bytes are less than a header")
    lengths = struct.unpack_from(f"<{element}I", stored)
    if any(length > rows for length in lengths) or header + sum(lengths) + rest != len(stored):
        raise CodecError(f"planes of {lengths} bytes do not make up a block of {len(out)} from {len(stored)}")
    elements = numpy.frombuffer(out, numpy.uint8, rows * element).reshape(-1, element)
    offset = header
    for number, length in enumerate(lengths):
        plane: bytes | memoryview = stored[offset : offset + length]
        if length < rows:
            plane = library.decompress(plane, rows)
        elements[:, number] = numpy.frombuffer(plane, numpy.uint8)
        offset += length
    out[rows * element :] = stored[offset:]


@cache
def _library(algorithm: int) -> _Library:
    return _lz4() if algorithm == _LZ4 else _zstd()


def _lz4() -> _Library:
    block = _need("lz4.block", "lz4", "lz4")

    def decompress(packed: bytes | memoryview, length: int) -> bytes:
        try:
            plain: bytes = block.decompress(packed, uncompressed_size=length)
        except (block.LZ4BlockError, ValueError) as error:
            raise CodecError(f"lz4: {error}") from error
        return _exactly(plain, length)

    return _Library(lambda plane: block.compress(plane, store_size=False), decompress)


def _zstd() -> _Library:
    try:
        standard = importlib.import_module("compression.zstd")  # Python 3.14 and later
    except ImportError:
        return _zstandard()

    def decompress(packed: bytes | memoryview, length: int) -> bytes:
        decompressor = standard.ZstdDecompressor()
        try:
            plain: bytes = decompressor.decompress(packed, max_length=length)
        except standard.ZstdError as error:
            raise CodecError(f"zstd: {error}") from error
        return _exactly(plain, length)

    return _Library(lambda plane: standard.compress(plane, level=_ZSTD_LEVEL), decompress)


def _zstandard() -> _Library:
    standard = _need("zstandard", "zstandard", "zstd")

    def decompress(packed: bytes | memoryview, length: int) -> bytes:
        try:
            # The frame names its size and the library allocates that, so it is checked first.
            if standard.frame_content_size(packed) != length:
                raise CodecError(f"zstd: a plane is not {length} bytes")
            plain: bytes = standard.ZstdDecompressor().decompress(packed)
        except standard.ZstdError as error:
            raise CodecError(f"zstd: {error}") from error
        return _exactly(plain, length)

    def compress(plane: memoryview) -> bytes:
        packed: bytes = standard.ZstdCompressor(level=_ZSTD_LEVEL).compress(plane)
        return packed

    return _Library(compress, decompress)


def _exactly(plain: bytes, length: int) -> bytes:
    if len(plain) != length:
        raise CodecError(f"{len(plain)} bytes came out where {length} should")
    return plain


def _need(module: str, package: str, codec: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        from tiercache.ground.extras import install_packages

        text = f"codec {codec!r} needs the package {package}: {install_packages(package)}, or choose 'raw'"
        raise ConfigError(text) from error
