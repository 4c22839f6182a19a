"""Packed fields: keys, frames, indices, checksums and extents as bytes."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable
from typing import NamedTuple


class Extent(NamedTuple):
    """One block in a segment file. `kind` and `codec` are as in the daemon's rows."""

    segment: int
    directory: int
    kind: int
    codec: int
    offset: int
    length: int
    stored_length: int
    checksum: int


_EXTENT = struct.Struct("<IHBBQIIQ")
EXTENT_BYTES = _EXTENT.size


def pack_extents(extents: Iterable[Extent]) -> bytes:
    """Extents as 32 bytes each: u32 segment, u16 directory, u8 kind, u8 codec, u64, u32, u32, u64."""
    return b"".join([_EXTENT.pack(*extent) for extent in extents])


def unpack_extents(packed: bytes) -> list[Extent]:
    """Inverse of `pack_extents`. Raises ValueError when the length is not a multiple of 32."""
    if len(packed) % EXTENT_BYTES:
        raise ValueError(f"extents are {EXTENT_BYTES} bytes each, and these are {len(packed)} bytes")
    return list(map(Extent._make, _EXTENT.iter_unpack(packed)))


def pack_checksums(checksums: list[int]) -> bytes:
    """Checksums as u64le, 8 bytes each."""
    return pack_frames(checksums)


def unpack_checksums(packed: bytes) -> array[int]:
    """Inverse of `pack_checksums`. Raises ValueError when the length is not a multiple of 8."""
    return unpack_frames(packed)


def pack_frames(frames: list[int]) -> bytes:
    """Frame numbers as u64le, 8 bytes each."""
    return _little_endian(array("Q", frames)).tobytes()


def unpack_frames(packed: bytes) -> array[int]:
    """Inverse of `pack_frames`. Raises ValueError when the length is not a multiple of 8."""
    frames = array("Q")
    frames.frombytes(packed)
    return _little_endian(frames)


def pack_indices(indices: list[int]) -> bytes:
    """Block indices as u32le, 4 bytes each."""
    return _little_endian(array("I", indices)).tobytes()


def unpack_indices(packed: bytes) -> array[int]:
    """Inverse of `pack_indices`. Raises ValueError when the length is not a multiple of 4."""
    indices = array("I")
    indices.frombytes(packed)
    return _little_endian(indices)


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
