"""Codecs are lossless, refuse bytes that they did not make, and write only where they should."""

from __future__ import annotations

import contextlib
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.daemon.tiers.forms import codecs
from tiercache.daemon.tiers.forms.codecs import CodecError

NAMES = ("lz4", "zstd")


def kv_bytes(length: int, seed: int = 1) -> bytes:
    """Like bfloat16 activations: high bytes of few values, low bytes of noise."""
    choose = random.Random(seed)
    low, high = choose.randbytes(length), choose.choices(b"\x3e\x3f\xbe\xbf\x3d", k=length)
    return bytes(high[place] if place % 2 else low[place] for place in range(length))


def decoded(codec: int, stored: bytes, length: int) -> bytes:
    """Decode into the middle of a guarded buffer."""
    area = bytearray(b"\xa5" * (length + 128))
    try:
        codecs.decode(codec, memoryview(stored), memoryview(area)[64 : 64 + length])
    finally:
        assert area[:64] == area[64 + length :] == b"\xa5" * 64
    return bytes(area[64 : 64 + length])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("element", codecs.ELEMENT_BYTES)
@pytest.mark.parametrize("length", [65536, 65535, 65537, 40961])
def test_what_is_encoded_is_decoded(name: str, element: int, length: int) -> None:
    codec = codecs.codec_number(name, element)
    data = bytes(length // 2) + kv_bytes(length - length // 2)
    encoded = codecs.encode(codec, memoryview(data))
    assert encoded is not None
    assert len(encoded) <= length - 4095
    assert decoded(codec, encoded, length) == data


@pytest.mark.parametrize("name", NAMES)
@given(data=st.binary(max_size=64), repeats=st.integers(1, 300), tail=st.binary(max_size=9))
@settings(deadline=None, max_examples=60)
def test_any_bytes_come_back(name: str, data: bytes, repeats: int, tail: bytes) -> None:
    block = data * repeats + tail
    for element in codecs.ELEMENT_BYTES:
        codec = codecs.codec_number(name, element)
        encoded = codecs.encode(codec, memoryview(block))
        assert (encoded is None) or decoded(codec, encoded, len(block)) == block


@pytest.mark.parametrize("name", NAMES)
@given(st.data())
@settings(deadline=None, max_examples=150)
def test_damaged_bytes_are_refused_or_fill_the_block_and_nothing_else(name: str, draw: st.DataObject) -> None:
    codec, length = codecs.codec_number(name), 12_000
    stored = bytearray(codecs.encode(codec, memoryview(bytes(6000) + kv_bytes(6000))) or b"")
    for _ in range(draw.draw(st.integers(1, 4))):
        stored[draw.draw(st.integers(0, len(stored) - 1))] = draw.draw(st.integers(0, 255))
    del stored[draw.draw(st.integers(0, len(stored)) | st.just(len(stored))) :]
    with contextlib.suppress(CodecError):
        decoded(codec, bytes(stored), length)  # holds the guards against it


@pytest.mark.parametrize("name", NAMES)
def test_lengths_that_do_not_add_up_are_refused(name: str) -> None:
    codec = codecs.codec_number(name)
    good = codecs.encode(codec, memoryview(bytes(20_000)))
    assert good is not None
    first, second = struct.unpack_from("<II", good)
    bad: list[tuple[bytes, int]] = [
        (b"", 20_000),
        (good[:7], 20_000),
        (good[:-1], 20_000),
        (good + b"\0", 20_000),
        (good, 19_998),
        (good, 20_001),
        (good, 40_000),
        (struct.pack("<II", first + 1, second - 1) + good[8:], 20_000),
        (struct.pack("<II", 0xFFFFFFFF, second) + good[8:], 20_000),
        (struct.pack("<II", 0, 0), 20_000),
        (struct.pack("<II", 10_001, 0) + bytes(10_001), 20_000),
    ]
    for stored, length in bad:
        with pytest.raises(CodecError):
            decoded(codec, stored, length)


def test_raw_is_raw() -> None:
    assert codecs.codec_number("raw", 2) == codecs.RAW == 0
    assert codecs.encode(codecs.RAW, memoryview(bytes(9000))) is None
    assert decoded(codecs.RAW, b"abc", 3) == b"abc"
    with pytest.raises(CodecError):
        decoded(codecs.RAW, b"abc", 4)


def test_numbers_name_algorithm_and_element() -> None:
    """These values are pinned: they are in the rows of blocks on disks."""
    assert (codecs.codec_number("lz4", 2), codecs.codec_number("lz4", 8)) == (0x21, 0x81)
    assert (codecs.codec_name(0), codecs.codec_name(0x21), codecs.codec_name(0x42)) == ("raw", "lz4", "zstd")
    known = [number for number in range(-1, 300) if codecs.known(number)]
    plain = [0, 0x11, 0x12, 0x21, 0x22, 0x41, 0x42, 0x81, 0x82]
    assert known == sorted([*plain, *(number | codecs.SEALED for number in plain)])
    with pytest.raises(CodecError):
        decoded(0x23, bytes(100), 100)
