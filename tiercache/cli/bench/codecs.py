"""What codecs save on KV blocks and what they cost: the blocks, given or synthetic, and the measurement.

A codec pays when a block takes less time with it than without:

    length / disk  >  length / codec + (length / ratio) / disk
    disk  <  codec * (1 - 1 / ratio)            with one core; n cores are good for n times that
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tiercache.daemon.tiers.forms import codecs
from tiercache.errors import ConfigError
from tiercache.ground.units import round_up

MAX_SAMPLE_BYTES = 64 << 20
"""Sample size; blocks are taken evenly from all files."""
SYNTHETIC_BYTES = 16 << 20
MEASURE_S = 0.5
"""Least time of measurement for each direction of a codec."""
_PAGE_BYTES = 4096
_HEAD_CHANNELS = 128


class CodecFigures(NamedTuple):
    """Result of one codec on the blocks; speeds in bytes of plain blocks per second of one core."""

    codec: str
    ratio: float
    encoded_share: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float

    @property
    def write_pays_below(self) -> float:
        """Bandwidth of a disk, bytes/s, below which one core makes writing faster with this codec."""
        return self.encode_bytes_per_s * (1 - 1 / self.ratio)

    @property
    def read_pays_below(self) -> float:
        """The same for reading."""
        return self.decode_bytes_per_s * (1 - 1 / self.ratio)


def blocks_of(files: list[Path], size: int) -> list[bytes]:
    """Blocks of some files, evenly spread; the rest at a file's end is left out."""
    room = max(1, MAX_SAMPLE_BYTES // size // len(files))
    blocks = []
    for path in files:
        try:
            with path.open("rb") as file:
                count = os.fstat(file.fileno()).st_size // size
                for number in range(min(room, count)):
                    file.seek(number * count // min(room, count) * size)
                    blocks.append(file.read(size))
        except OSError as error:
            raise ConfigError(f"--file = {path}: {error.strerror}: name a file that can be read") from None
        if count == 0:
            raise ConfigError(f"--file = {path}: is shorter than a block of {size} bytes: see --block-bytes")
    return blocks


def made_up_blocks(size: int) -> list[bytes]:
    """Made-up blocks that a codec cannot tell from KV: the top bits of a bfloat16 are its value's magnitude."""
    import numpy as np

    rng = np.random.default_rng(1)
    rows = -(-size // (2 * _HEAD_CHANNELS))
    scales = np.exp(rng.normal(0, 0.7, _HEAD_CHANNELS)).astype(np.float32)
    blocks = []
    for _ in range(max(1, SYNTHETIC_BYTES // size)):
        values = rng.standard_normal((rows, _HEAD_CHANNELS), np.float32) * scales
        bits = values.view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # to nearest, ties to even
        blocks.append(rounded.astype("<u2").tobytes()[:size])
    return blocks


def measure(element: int, blocks: list[bytes]) -> tuple[list[CodecFigures], dict[str, str]]:
    """Measure every codec; also returns why those are missing that cannot be used here."""
    figures, missing = [], {}
    for name in codecs.NAMES[1:]:
        try:
            figures.append(_measure(name, element, blocks))
        except ConfigError as error:
            missing[name] = str(error)
    return figures, missing


def _measure(name: str, element: int, blocks: list[bytes]) -> CodecFigures:
    """Encode and decode all blocks repeatedly, and compare the results. Raises ConfigError."""
    codec = codecs.codec_number(name, element)
    views = [memoryview(block) for block in blocks]
    stored = [codecs.encode(codec, view) for view in views]
    plain = sum(map(len, blocks))
    moved = sum(_on_disk(block if packed is None else packed) for block, packed in zip(blocks, stored, strict=True))
    whole = sum(map(_on_disk, blocks))
    encoded = [(memoryview(packed), len(block)) for packed, block in zip(stored, blocks, strict=True) if packed]
    out = memoryview(bytearray(max(map(len, blocks))))
    for (packed, length), block in zip(encoded, [b for b, p in zip(blocks, stored, strict=True) if p], strict=True):
        codecs.decode(codec, packed, out[:length])
        if out[:length] != block:
            raise ConfigError(f"codec {name} gave back other bytes than it was given: do not use it")

    def encode_all() -> None:
        for view in views:
            codecs.encode(codec, view)

    def decode_all() -> None:
        for packed, length in encoded:
            codecs.decode(codec, packed, out[:length])

    encode_s = _seconds(encode_all)
    decode_s = _seconds(decode_all) if encoded else 0.0
    decoded_bytes = sum(length for _, length in encoded)
    return CodecFigures(
        codec=name,
        ratio=whole / moved,
        encoded_share=len(encoded) / len(blocks),
        encode_bytes_per_s=plain / encode_s,
        decode_bytes_per_s=decoded_bytes / decode_s if decode_s else 0.0,
    )


def _on_disk(stored: bytes) -> int:
    return round_up(len(stored), _PAGE_BYTES)


def _seconds(call: Callable[[], None]) -> float:
    """CPU time of this thread for one call: the median of as many calls as fit into MEASURE_S, at least 3."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < MEASURE_S:
        start_s = time.thread_time()
        call()
        times.append(time.thread_time() - start_s)
    return max(sorted(times)[len(times) // 2], 1e-9)
