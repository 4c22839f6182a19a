"""`tiercache check` without a daemon: damage made by hand in a directory that a real daemon has filled."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from chains import chain_of
from cluster import BLOCK_BYTES, Cluster

from tiercache.daemon.tiers.nvme.catalog.database import row_checksum as _checksum
from tiercache.daemon.tiers.nvme.catalog.rows import Row, pack_row, place_of, segment_and_slot, unpack_row
from tiercache.daemon.tiers.nvme.check.directory_check import ALL, check_directory
from tiercache.daemon.tiers.nvme.check.findings import Report
from tiercache.daemon.tiers.nvme.disk.lock import take_lock
from tiercache.errors import ConfigError
from tiercache.protocol.namespaces import NamespaceSpec

CHAIN = chain_of("checked", 12)
OTHER = chain_of("other", 3)
SLOT = BLOCK_BYTES // 4096
SEGMENT = "segments/00000001.seg"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a chain of 12 blocks and one of 3, left by a daemon that was killed."""
    cluster = Cluster(tmp_path_factory.mktemp("filled"), nvme_segment="2MiB", nvme_size="16MiB")
    cluster.store(CHAIN)
    cluster.store(OTHER)
    cluster.wait_written()
    cluster.kill()
    return cluster.directories[0]


@pytest.fixture
def directory(filled: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(filled, tmp_path / "nvme"))


@contextmanager
def database(directory: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(directory / "index.db")) as db:
        yield db
        db.commit()


def rows(directory: Path) -> dict[int, Row]:
    with database(directory) as db:
        found = {place: unpack_row(place, record) for place, record in db.execute("SELECT place, record FROM blocks")}
    return {place: row for place, row in found.items() if row is not None}


def put(directory: Path, place: int, row: Row) -> None:
    with database(directory) as db:
        db.execute("INSERT OR REPLACE INTO blocks VALUES(?, ?)", (place, pack_row(place, row)))


def at(directory: Path, number: int) -> tuple[int, Row]:
    """Place and row of a block of the chain."""
    key = CHAIN[16 * number : 16 * number + 16]
    return next((place, row) for place, row in rows(directory).items() if row.key == key)


def check(directory: Path, repair: bool = False) -> Report:
    return check_directory(directory, sample=ALL, rate=0, repair=repair)


def free_place(directory: Path) -> int:
    """A slot that holds nothing, in a segment that is in use."""
    used = rows(directory)
    segment, _ = segment_and_slot(max(used))
    places = (place_of(segment, slot) for slot in range(0, (2 << 20) // 4096, SLOT))
    return next(place for place in places if place not in used)


# --- what is well --------------------------------------------------------------------------------


def test_a_killed_daemon_leaves_a_clean_directory(directory: Path) -> None:
    report = check(directory)
    assert (report.findings, report.rows, report.scanned_blocks) == ([], 15, 15)
    assert report.scanned_bytes == 15 * BLOCK_BYTES
    assert check(directory, repair=True).deleted_rows == 0
    assert len(rows(directory)) == 15


def test_reading_keeps_to_its_rate(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only sleeping moves."""
    now_s, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now_s[0] += seconds

    monkeypatch.setattr("tiercache.daemon.tiers.nvme.check.directory_check.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr("tiercache.daemon.tiers.nvme.check.directory_check.time.sleep", sleep)
    check_directory(directory, sample=ALL, rate=BLOCK_BYTES * 10)
    assert sum(slept) == pytest.approx(1.5)


# --- what is not ---------------------------------------------------------------------------------


class Damage(NamedTuple):
    """For each kind of damage: how to do it, a word of the finding, and the rows that a repair leaves."""

    do: Callable[[Path], object]
    words: str
    left: int


def changed(statement: str, *values: object) -> Callable[[Path], None]:
    """Changes the database by a statement."""

    def do(directory: Path) -> None:
        with database(directory) as db:
            db.execute(statement, values)

    return do


def changed_at(number: int, statement: str) -> Callable[[Path], None]:
    """The same, with the place of a block of the chain."""
    return lambda directory: changed(statement, at(directory, number)[0])(directory)


spoil_row = changed_at(4, "UPDATE blocks SET record = zeroblob(76) WHERE place = ?")
shorten_row = changed_at(11, "UPDATE blocks SET record = 'text' WHERE place = ?")
delete_row = changed_at(3, "DELETE FROM blocks WHERE place = ?")
senseless_slots = changed("UPDATE segments SET slot_bytes = 5000, checksum = ? WHERE segment = 1", _checksum(1, 5000))
lose_count = changed("UPDATE meta SET value = 1 WHERE key = 'sequence'")
foreign_database = changed("UPDATE meta SET value = zeroblob(16) WHERE key = 'directory_id'")


def swap_rows(directory: Path) -> None:
    """Two good rows, each at the other's place: the seed of a row's checksum is its place."""
    first, second = at(directory, 10)[0], at(directory, 11)[0]
    with database(directory) as db:
        records = dict(db.execute("SELECT place, record FROM blocks"))
        db.execute("UPDATE blocks SET record = ? WHERE place = ?", (records[second], first))
        db.execute("UPDATE blocks SET record = ? WHERE place = ?", (records[first], second))


def move_row(directory: Path, number: int, place: int) -> None:
    old, row = at(directory, number)
    with database(directory) as db:
        db.execute("DELETE FROM blocks WHERE place = ?", (old,))
    put(directory, place, row)


def change_row(number: int, **fields: object) -> Callable[[Path], None]:
    def do(directory: Path) -> None:
        place, row = at(directory, number)
        put(directory, place, row._replace(**fields))  # rule: a NamedTuple's own  # type: ignore[arg-type]

    return do


def bite_own_tail(directory: Path) -> None:
    place, row = at(directory, 2)
    put(directory, place, row._replace(parent=at(directory, 9)[1].key))  # rule: a NamedTuple's own


def copy_row(directory: Path) -> None:
    put(directory, free_place(directory), at(directory, 11)[1])


def resize_slots(directory: Path) -> None:
    segment, _ = segment_and_slot(at(directory, 0)[0])
    with database(directory) as db:
        values = (2 * BLOCK_BYTES, _checksum(segment, 2 * BLOCK_BYTES), segment)
        db.execute("UPDATE segments SET slot_bytes = ?, checksum = ? WHERE segment = ?", values)


def change_namespace(directory: Path) -> None:
    """The spec of another block size under the fingerprint of this one."""
    with database(directory) as db:
        number, print_, spec, epoch = db.execute("SELECT number, fingerprint, spec, epoch FROM namespaces").fetchone()
        other = msgspec.structs.replace(msgspec.msgpack.decode(spec, type=NamespaceSpec), block_bytes=4096)
        values = (number, print_, msgspec.msgpack.encode(other), epoch)
        db.execute("UPDATE namespaces SET spec = ?, checksum = ?", (values[2], _checksum(*values)))


def flip_bit(directory: Path) -> None:
    segment, slot = segment_and_slot(at(directory, 5)[0])
    path, at_byte = directory / "segments" / f"{segment:08d}.seg", slot * 4096 + 1234
    whole = bytearray(path.read_bytes())
    whole[at_byte] ^= 16
    path.write_bytes(whole)


def tear_database(directory: Path) -> None:
    """A page of the rows' table gets lost; put into the file first."""
    with database(directory) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'blocks'").fetchone()
    with (directory / "index.db").open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(bytes(4096))


def remove_database(directory: Path) -> None:
    for path in directory.glob("index.db*"):
        path.unlink()


# Of the chain's 12 blocks those before the damaged one stay, and the other chain's 3.
DAMAGES = {
    "damaged row": Damage(spoil_row, "the row is damaged", 4 + 3),
    "row of another type": Damage(shorten_row, "the row is damaged", 11 + 3),
    "rows at each other's place": Damage(swap_rows, "the row is damaged", 10 + 3),
    "orphan chain": Damage(delete_row, "the block before it is not here", 3 + 3),
    "circle": Damage(bite_own_tail, "the block before it is not here", 2 + 3),
    "no such segment": Damage(lambda path: move_row(path, 6, place_of(99, 0)), "there is no segment 99", 6 + 3),
    "behind the segment": Damage(
        lambda path: move_row(path, 6, place_of(1, (2 << 20) // 4096)), "ends behind the segment", 6 + 3
    ),
    "between two slots": Damage(lambda path: move_row(path, 7, at(path, 6)[0] + 1), "so it overlaps others", 7 + 3),
    "negative place": Damage(lambda path: move_row(path, 6, -5), "there is no segment -1", 6 + 3),
    "slot size": Damage(resize_slots, "need slots of 65536 bytes, these have 131072", 0),
    "senseless slot size": Damage(senseless_slots, "slots of 5000 bytes", 0),
    "length": Damage(change_row(8, length=4096, stored_length=4096), "blocks of its namespace have 65536", 8 + 3),
    "stored length": Damage(change_row(8, stored_length=BLOCK_BYTES + 1), "bytes are stored of a block", 8 + 3),
    "codec": Damage(change_row(8, codec=0x23), "codec 35", 8 + 3),
    "kind": Damage(change_row(8, kind=9), "checksum kind 9", 8 + 3),
    "namespace": Damage(change_row(8, namespace=77), "namespace 77 is not known", 8 + 3),
    "forgotten namespace": Damage(changed("DELETE FROM namespaces"), "namespace 1 is not known", 0),
    "changed namespace": Damage(change_namespace, "namespace 1 is not known", 0),
    "two slots": Damage(copy_row, "is also in segment", 12 + 3),
    "checksum in a row": Damage(change_row(8, checksum=5), "fail their checksum", 8 + 3),
    "flipped bit": Damage(flip_bit, "fail their checksum", 5 + 3),
    "segment without file": Damage(lambda path: (path / SEGMENT).unlink(), "segment 1 has no file", 0),
    "short segment": Damage(lambda path: os.truncate(path / SEGMENT, 1 << 20), "segment 1 has 1048576 bytes", 0),
    "count of insertions": Damage(lose_count, "1 insertions are counted", 12 + 3),
    "small table": Damage(changed("UPDATE namespaces SET epoch = 7"), "fails its checksum", 0),
    "another directory's database": Damage(foreign_database, "belongs to another directory", 0),
    "rubbish": Damage(lambda path: (path / "index.db").write_bytes(os.urandom(20_000)), "cannot be read", 0),
    "torn page": Damage(tear_database, "index.db", 0),
    "suspect": Damage(lambda path: (path / "index.db.suspect").touch(), "found damaged while it was in use", 0),
    "no database": Damage(remove_database, "there is none", 0),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_repaired(directory: Path, name: str) -> None:
    damage = DAMAGES[name]
    if name in ("slot size", "senseless slot size", "segment without file", "short segment"):
        assert {segment_and_slot(place)[0] for place in rows(directory)} == {1}, "all rows are in that segment"
    damage.do(directory)
    before = {path: path.read_bytes() for path in sorted(directory.rglob("*.seg"))}
    report = check(directory)
    assert any(damage.words in finding for finding in report.findings), report.findings
    assert check(directory).findings == report.findings, "a check changes nothing"
    assert {path: path.read_bytes() for path in sorted(directory.rglob("*.seg"))} == before
    repaired = check(directory, repair=True)
    assert repaired.findings == report.findings
    after = check(directory)
    assert (after.findings, after.rows) == ([], damage.left)


def test_a_damaged_superblock_is_found_and_left_to_the_daemon(directory: Path) -> None:
    (directory / "superblock").write_bytes(bytes(4096))
    for repair in (True, False):
        report = check(directory, repair=repair)
        assert [finding[:11] for finding in report.findings] == ["superblock:"]
    (directory / "superblock").unlink()
    assert "there is none" in check(directory).findings[0]
    assert list(directory.rglob("*.seg"))


# --- what a crash leaves -------------------------------------------------------------------------


def test_flushed_rows_are_no_fault(directory: Path) -> None:
    """A flush is durable before the rows are gone."""
    with database(directory) as db:
        number, print_, spec, _ = db.execute("SELECT number, fingerprint, spec, epoch FROM namespaces").fetchone()
        db.execute("UPDATE namespaces SET epoch = 3, checksum = ?", (_checksum(number, print_, spec, 3),))
    report = check(directory)
    assert (report.findings, report.scanned_blocks) == ([], 0)
    assert "15 flushed blocks" in report.notes[-1]


@pytest.mark.parametrize("row_is_left", [True, False])
def test_rows_behind_a_flushed_block_are_no_fault(directory: Path, row_is_left: bool) -> None:
    place, row = at(directory, 5)
    with database(directory) as db:
        stone = (row.namespace, row.key, row.epoch + 1)
        db.execute("INSERT INTO tombstones VALUES(?, ?, ?, ?)", (*stone, _checksum(*stone)))
        if not row_is_left:
            db.execute("DELETE FROM blocks WHERE place = ?", (place,))
    report = check(directory)
    assert report.findings == []
    assert f"{6 + row_is_left} flushed blocks" in report.notes[-1]


def test_segments_that_are_not_in_use_are_no_fault(directory: Path) -> None:
    for number, size in ((7, 2 << 20), (8, 12_288)):
        with (directory / "segments" / f"{number:08d}.seg").open("wb") as file:
            file.truncate(size)
    (directory / "segments" / "notes.txt").write_text("not ours")
    report = check(directory, repair=True)
    assert report.findings == []
    text = " ".join(report.notes)
    assert "segment 7: not in use yet" in text
    assert "segment 8: not made to its end" in text
    assert "notes.txt is none of ours" in text


# --- what cannot be checked ----------------------------------------------------------------------


def test_a_directory_in_use_is_refused(directory: Path) -> None:
    fd = take_lock(directory)
    try:
        with pytest.raises(ConfigError, match=rf"pid {os.getpid()}.*stop it, or check it while it runs"):
            check(directory)
    finally:
        os.close(fd)
    assert check(directory).findings == []


def test_what_is_no_cache_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not an nvme directory of tiercache"):
        check(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="cannot be checked"):
        check(tmp_path / "none")
