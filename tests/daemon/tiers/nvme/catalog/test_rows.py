"""Records: what is packed comes back, and nothing else does."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from tiercache.daemon.tiers.nvme.catalog.rows import (
    MAX_SEGMENTS,
    MAX_SLOTS,
    RECORD_BYTES,
    ROOT_KEY,
    Row,
    pack_row,
    place_of,
    unpack_rows,
)

u8, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (8, 32, 64))
keys = st.binary(min_size=16, max_size=16)
rows = st.builds(Row, keys, keys, u32, u32, u32, u32, u8, u8, u64, u64)
places = st.builds(place_of, st.integers(0, MAX_SEGMENTS - 1), st.integers(0, MAX_SLOTS - 1))

ROW = Row(b"k" * 16, ROOT_KEY, 3, 4, 5000, 4096, 1, 2, 2**64 - 1, 77)


def test_the_record_from_the_bytes() -> None:
    record = pack_row(9, ROW)
    assert len(record) == RECORD_BYTES == 76
    assert record[:32] == b"k" * 16 + bytes(16)
    assert struct.unpack_from("<4I4BQQ", record, 32) == (3, 4, 5000, 4096, 1, 2, 0, 0, 2**64 - 1, 77)


@given(st.lists(st.tuples(places, rows), max_size=20), st.sets(st.integers(0, 19)))
def test_many_records_at_once(placed: list[tuple[int, Row]], spoiled: set[int]) -> None:
    records = [(place, pack_row(place, row)) for place, row in placed]
    for number in spoiled & set(range(len(records))):
        place, record = records[number]
        records[number] = (place, (record[:-1], record + b"\0", b"\1" + record[1:] + b"x", record[::-1])[number % 4])
    good, damaged = unpack_rows(records)
    assert list(good) == [item for number, item in enumerate(placed) if number not in spoiled]
    assert damaged == [item for number, item in enumerate(records) if number in spoiled]
