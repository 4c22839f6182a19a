"""Flushes that the store did not take: told later and later, kept in a file, and told to the operator."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from played import played

from tiercache.cli.doctor.hits import _shared as shared_findings
from tiercache.daemon.tiers.shared.epochs import EpochReader, Epochs
from tiercache.daemon.tiers.shared.flushes import FlushJob, SharedFlushes
from tiercache.daemon.tiers.shared.naming import Naming, Scope
from tiercache.daemon.tiers.shared.stores.store import StoreError, StoreProblem

pytestmark = pytest.mark.usefixtures("nothing_is_missing_for_long")


@played
async def test_a_store_that_refuses_is_told_later_and_later(tmp_path: Path) -> None:
    jobs, pauses = list[FlushJob](), list[tuple[float, float]]()

    def uniform(low: float, high: float) -> float:
        pauses.append((low, high))
        return 0.0  # at once

    epochs = Epochs(Naming("d", b""))
    its = SharedFlushes(epochs, tmp_path / "state", jobs.append, lambda job: None, lambda: False, uniform)
    its.begin([b"note"], lambda durable: None)
    seen = []
    for number in range(1, 10):
        seen.append(its._pause_s)
        jobs[-1].problem = StoreError(StoreProblem.READ_ONLY, "no")
        jobs[-1].ended()
        while len(jobs) == number:
            await asyncio.sleep(0)
    assert seen == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert pauses == [(0.5, 1.5)] * 9, "hosts do not try at the same time"
    jobs[-1].learned = {b"note": b"new"}
    jobs[-1].problem = None
    jobs[-1].ended()
    assert (its.waiting, its._pause_s) == (False, 0.5)
    while its._saving is not None:
        await asyncio.sleep(0.001)


@played
async def test_a_late_write_of_the_file_does_not_undo_the_one_at_the_end(tmp_path: Path) -> None:
    loop, threads, busy = asyncio.get_running_loop(), ThreadPoolExecutor(1), threading.Event()
    loop.set_default_executor(threads)
    state = tmp_path / "state"
    its = SharedFlushes(Epochs(Naming("d", b"")), state, lambda job: None, lambda job: None, lambda: True)
    blocked = loop.run_in_executor(None, busy.wait, 60)
    its._save()  # all was told, so the file goes
    its.begin([b"note"], lambda durable: None)
    its.close()
    assert state.read_text() == b"note".hex()
    busy.set()
    await blocked
    assert its._saving is not None
    await its._saving
    assert state.read_text() == b"note".hex()


def test_the_doctor_says_that_a_flush_was_not_told() -> None:
    shared = {"lookups": 0, "lookups_late": 0, "bad_blocks": 0, "flushes_waiting": 2, "flush_tries": 5}
    (finding,) = shared_findings({"tiers": {"shared": shared}})
    assert "flush not told yet: 2 notes wait after 5 tries" in str(finding)
    assert not list(shared_findings({"tiers": {"shared": {**shared, "flushes_waiting": 0}}}))


@played
async def test_a_note_that_is_wanted_again_while_it_is_told_is_told_again(tmp_path: Path) -> None:
    """What was stored between the two flushes may have gone out under the first one's note."""
    jobs, epochs, answers = list[FlushJob](), Epochs(Naming("d", b"")), list[str]()
    its = SharedFlushes(epochs, tmp_path / "state", jobs.append, lambda job: None, lambda: False)
    for name in ("first", "second"):
        its.end(its.begin([b"note"], lambda durable, name=name: answers.append(name)))  # type: ignore[misc]
    for number, told in enumerate((["first"], ["first", "second"])):
        jobs[number].learned = {b"note": b"new%d" % number}
        jobs[number].ended()
        assert (answers, its.waiting, b"note" in epochs.pending) == (told, number == 0, number == 0)
    assert len(jobs) == 2


@played
async def test_notes_are_in_use_once_the_store_and_all_of_dram_know_of_the_flush(tmp_path: Path) -> None:
    naming, jobs = Naming("d", b""), list[FlushJob]()
    epochs, scope = Epochs(naming), Scope("ab" * 16, 3)
    before = [b"1" * 16, b"2" * 16, b"3" * 16]
    epochs.learn(dict(zip(naming.notes(scope), before, strict=True)))
    reader = EpochReader(epochs, [scope])
    assert reader.check(before)
    its = SharedFlushes(epochs, tmp_path / "state", jobs.append, lambda job: None, lambda: False)
    number = its.begin([naming.deployment_note], lambda durable: None)
    assert not reader.check(before), "the store answered before it was told"
    jobs[0].learned = {naming.deployment_note: b"4" * 16}
    jobs[0].ended()
    assert not reader.check([b"4" * 16, *before[1:]]), "DRAM has blocks from before the flush"
    assert its.end(number) == {naming.deployment_note}
    assert not reader.check([b"4" * 16, *before[1:]]), "the names have changed"
    assert reader.check([b"4" * 16, *before[1:]])
