"""The checksum identifies the block to which bytes belong."""

from __future__ import annotations

import itertools

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tiercache.protocol.checksums import CHECKSUM_XXH3, block_checksum, block_seed

KEY, NAMESPACE = bytes(range(16)), "0123456789abcdef" * 2


def test_seeds_and_checksums_never_change() -> None:
    """These values are pinned: with others every block that is on a disk would be a miss."""
    seed = block_seed(KEY, NAMESPACE, 2 << 20, 0, CHECKSUM_XXH3)
    assert (CHECKSUM_XXH3, seed) == (1, 0xA3B198A56BAC82BB)
    assert block_checksum(b"tiercache", seed) == 0x642134EE32F5ABE8
    assert block_seed(KEY, NAMESPACE, 2 << 20, 0) == seed


def test_every_field_has_its_say() -> None:
    fields = [(KEY, KEY[::-1]), (NAMESPACE, NAMESPACE[::-1]), (4096, 4097), (0, 0x21), (1, 2)]
    seeds = {block_seed(*choice) for choice in itertools.product(*fields)}  # type: ignore[arg-type]
    assert len(seeds) == 2 ** len(fields)


@given(st.binary(min_size=1, max_size=600), st.integers(0, 2**64 - 1), st.data())
def test_a_changed_byte_changes_it(data: bytes, seed: int, draw: st.DataObject) -> None:
    place, flip = draw.draw(st.integers(0, len(data) - 1)), draw.draw(st.integers(1, 255))
    other = bytearray(data)
    other[place] ^= flip
    checksum = block_checksum(data, seed)
    assert 0 <= checksum < 2**64
    assert block_checksum(memoryview(other), seed) != checksum
    assert block_checksum(memoryview(data), seed) == checksum == xxhash.xxh3_64(data, seed).intdigest()
    assert block_checksum(data, seed ^ 1) != checksum
