"""Linux AIO: the kernel's context, what the carrier does when the kernel takes little or hangs, and the probe."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from disk_rig import ObedientContext, ObedientDisk, Rig, content

from tiercache.daemon.tiers.nvme.disk import aio, kernel_aio
from tiercache.daemon.tiers.nvme.disk.aio_probe import refusal_of_aio
from tiercache.daemon.tiers.nvme.disk.block_io import NOWHERE
from tiercache.daemon.tiers.nvme.disk.carriers import why_threads
from tiercache.daemon.tiers.nvme.disk.disk import DiskIO
from tiercache.daemon.tiers.nvme.disk.kernel_aio import AioContext
from tiercache.daemon.tiers.nvme.disk.queue import DiskOutcome, DiskPriority

OK, IO_ERROR, ABANDONED = DiskOutcome.OK, DiskOutcome.IO_ERROR, DiskOutcome.ABANDONED


# --- a kernel that takes less than it is given ---------------------------------------------------


class Stingy(ObedientContext):
    """Takes so many transfers in a call, and as many in all until results are fetched; then it says EAGAIN."""

    most = 2
    refused = 0
    full = True
    bad: Callable[[int], bool] = staticmethod(lambda place: False)  # type: ignore[assignment]

    def submit(self, places: Sequence[int]) -> int:
        if self.flying >= self.most and self.full:
            type(self).refused += 1
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if type(self).bad(places[0]):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return super().submit(places[: self.most - self.flying if self.full else self.most])


@pytest.fixture
def stingy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(Stingy, "refused", 0)
    monkeypatch.setattr(ObedientDisk, "aio", lambda disk, *args: Stingy(disk, *args))
    rig = Rig(tmp_path / "nvme", threads=16)
    yield rig
    rig.close()


@pytest.mark.parametrize("full", [True, False], ids=["EAGAIN", "in part"])
def test_what_the_kernel_does_not_take_comes_later(stingy: Rig, monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    monkeypatch.setattr(Stingy, "full", full)
    stingy.disk.gate.clear()
    writes = [stingy.write_op(2 * number, content(number, 5000)) for number in range(20)]
    assert stingy.queue.submit_many(writes, DiskPriority.LOAD) == 20
    stingy.until(lambda: stingy.disk.running == (2 if full else 16))
    stingy.until(lambda: bool(Stingy.refused) == full)  # while those that it took are held
    stingy.disk.gate.set()
    stingy.until(lambda: stingy.queue.in_flight == 0)
    assert [op.outcomes for op in writes] == [[OK]] * 20
    assert bool(Stingy.refused) == full
    reads = [stingy.read_op(op, 2 * number + 1) for number, op in enumerate(writes)]
    assert stingy.run(reads) == [OK] * 20
    assert all(stingy.frame(2 * number + 1, 5000) == content(number, 5000) for number in range(20))


def test_results_that_come_together_are_ended_by_and_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The carrier does not sleep while some of them are left."""
    monkeypatch.setattr(aio, "END_BYTES", 1)
    rig = Rig(tmp_path / "nvme", threads=8)
    written = rig.store([0, 1, 2, 3], 8192)
    rig.disk.gate.clear()
    reads = [rig.read_op(op, 8 + 2 * number) for number, op in enumerate(written)]
    assert rig.queue.submit_many(reads, DiskPriority.LOAD) == 4
    rig.until(lambda: rig.disk.running > 0)
    rig.disk.gate.set()
    rig.until(lambda: rig.queue.in_flight == 0)
    assert [op.outcomes for op in reads] == [[OK]] * 4
    rig.close()


# --- what hangs ----------------------------------------------------------------------------------


def test_what_the_kernel_holds_is_kept_until_it_lets_go(tmp_path: Path) -> None:
    before = set(kernel_aio._open)
    rig = Rig(tmp_path / "nvme", threads=4)
    [context] = set(kernel_aio._open) - before
    written = rig.store([0], 8192)
    rig.disk.gate.clear()
    reads = [rig.read_op(written[0], 8), rig.read_op(written[0], 9, addresses=NOWHERE)]
    assert rig.queue.submit_many(reads, DiskPriority.LOAD) == 2
    rig.until(lambda: rig.disk.running == 2)
    assert not rig.queue.stop(0.0)
    assert [op.outcomes for op in reads] == [[ABANDONED]] * 2
    assert context in kernel_aio._open
    frame = rig.frame(8, 8192)
    rig.disk.gate.set()
    assert rig.stop()
    assert context not in kernel_aio._open
    assert [op.outcomes for op in reads] == [[ABANDONED]] * 2, "nobody looks at the frames any more"
    assert frame != rig.frame(8, 8192), "which is why nobody may have them"
    rig.close()


# --- whether to use it ---------------------------------------------------------------------------


class NoAio(DiskIO):
    """A disk whose contexts come to nothing, for one reason or another."""

    def __init__(self, number: int = 0, result: int | None = None, damage: bool = False, refused: str = "") -> None:
        self.number, self.result, self.damage, self.refused = number, result, damage, refused

    def aio(self, depth: int, eventfd: int, most_pieces: int) -> AioContext:
        if self.number:
            raise OSError(self.number, os.strerror(self.number))
        return Odd(self, depth, eventfd, most_pieces)


class Odd(AioContext):
    def __init__(self, disk: NoAio, *args: int) -> None:
        super().__init__(*args)
        self._disk = disk

    def ready(self, place: int, writes: bool, fd: int, pieces: Sequence[tuple[int, int]], offset: int) -> None:
        super().ready(place, writes and not self._disk.damage, fd, pieces, offset)

    def close(self) -> None:
        super().close()
        self._refuse("io_destroy")

    def _refuse(self, call: str) -> None:
        if self._disk.refused == call:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    def results(self, least: int = 0) -> list[tuple[int, int]]:
        self._refuse("io_getevents")
        wrong = self._disk.result
        found = super().results(least)
        return [(place, result if wrong is None else wrong) for place, result in found]


@pytest.mark.parametrize(
    ("disk", "reason"),
    [
        (DiskIO(), ""),
        (NoAio(), ""),
        (NoAio(errno.ENOSYS), "this kernel refuses io_setup: Function not implemented"),
        (NoAio(errno.EPERM), "this kernel refuses io_setup: Operation not permitted"),
        (NoAio(errno.EAGAIN), "fs.aio-max-nr"),
        (NoAio(refused="io_getevents"), "this kernel refuses io_getevents: Operation not permitted"),
        (NoAio(refused="io_destroy"), "this kernel refuses io_destroy: Operation not permitted"),
        (NoAio(result=-errno.EINVAL), "AIO fails on this file system: Invalid argument"),
        (NoAio(result=512), "AIO fails on this file system: 512 bytes of a page"),
        (NoAio(result=-errno.ENOSPC), ""),
        (NoAio(damage=True), "AIO fails on this file system: 0 bytes of a page"),
    ],
)
def test_the_probe_says_why_not(tmp_path: Path, disk: DiskIO, reason: str) -> None:
    (tmp_path / "probe").write_bytes(b"left by another life")
    found = refusal_of_aio(disk, tmp_path / "probe")
    assert reason in found
    assert bool(reason) == bool(found)
    assert "io_setup" in reason or reason == "fs.aio-max-nr" or not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("nvme_io", "codec", "beside_loop", "reason"),
    [
        ("auto", "raw", False, ""),
        ("aio", "lz4", False, ""),
        ("aio", "raw", True, ""),
        ("threads", "raw", False, "nvme_io = threads"),
        ("auto", "zstd", False, "nvme_codec = zstd"),
        ("auto", "raw", True, "beside the event loop"),
    ],
)
def test_settings_that_want_threads(nvme_io: str, codec: str, beside_loop: bool, reason: str) -> None:
    found = why_threads(nvme_io, codec, beside_loop)
    assert reason in found
    assert bool(reason) == bool(found)
