"""Worker processes end at bad moments: twice in a row, by a defect of their own, as the daemon ends; and many do."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chains import chain_of
from played import played
from waiting import state_of
from worker_rig import WorkerRig

from tiercache.daemon.helper_processes import pulse
from tiercache.daemon.helper_processes.process import HelperProcess, ProcessError, ProcessProblem
from tiercache.daemon.tiers.nvme import keepers
from tiercache.daemon.tiers.nvme.worker import directory_worker, messages
from tiercache.daemon.tiers.nvme.worker.directory_worker import DirectoryWorker
from tiercache.errors import ConfigError
from tiercache.protocol.messages import KEY_BYTES

LIMITS_OF_TESTS = replace(directory_worker.LIMITS, first_pause_s=0.01, longest_pause_s=0.02)


def worker_of(rig: WorkerRig) -> DirectoryWorker:
    its = rig.shelf().directory._end.__self__  # type: ignore[attr-defined]
    assert isinstance(its, DirectoryWorker)
    return its


@pytest.mark.parametrize("line", ["rows", "blocks", "files"])
@played
async def test_a_thread_that_fails_ends_the_process(
    tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = await WorkerRig(tmp_path).open()
    space, chain = rig.namespace(), chain_of("a", 20)
    await rig.store_below([space], chain)
    pid, life = rig.pid(), worker_of(rig)._life
    assert life is not None
    getattr(life, line).send(b"\0nonsense that no daemon sends")
    await rig.replaced(pid)
    assert f"thread {line} of a worker process fails, which ends the process" in caplog.text
    assert await rig.load(space, chain) == 20
    await rig.close()


@played
async def test_the_next_process_ends_too_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is told before the loop takes it into use: then what it would be sent would never come back."""
    rig = await WorkerRig(tmp_path).open()
    space, chain = rig.namespace(), chain_of("a", 20)
    await rig.store_below([space], chain)
    worker, shelf = worker_of(rig), rig.shelf()
    killed, waiting = list[int](), list[asyncio.Task[None]]()
    use_again = worker._use_again

    def kill_first(life: directory_worker._Life) -> None:
        if not killed:
            killed.append(life.its.pid)
            os.kill(life.its.pid, signal.SIGKILL)
            life.its.process.wait()
            before = worker._last_gone
            waiting.append(asyncio.ensure_future(gone(life, before)))
        else:
            use_again(life)

    async def gone(life: directory_worker._Life, before: object) -> None:
        while worker._last_gone is before:
            await asyncio.sleep(0.001)
        use_again(life)

    monkeypatch.setattr(worker, "_use_again", kill_first)
    first = rig.signal(signal.SIGKILL)
    await rig.until(lambda: bool(killed) and rig.pid() not in (0, first, *killed))
    assert rig.shelf() is shelf, "the index is still good"
    assert await rig.load(space, chain) == 20
    rig.check()
    await rig.close()


@played
async def test_a_process_without_lines_is_followed_by_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await WorkerRig(tmp_path).open()
    space, chain = rig.namespace(), chain_of("a", 20)
    await rig.store_below([space], chain)
    worker, shelf = worker_of(rig), rig.shelf()
    open_line, refused = worker._supervisor.open_line, list[float]()

    def refuse(deadline_s: float) -> object:
        if len(refused) < 2:
            refused.append(deadline_s)
            raise ProcessError(ProcessProblem.NO_RESOURCES, "no line to its helper process: Too many open files")
        return open_line(deadline_s)

    monkeypatch.setattr(worker._supervisor, "open_line", refuse)
    await rig.replaced(rig.signal(signal.SIGKILL))
    assert len(refused) == 2
    assert rig.shelf() is shelf
    assert await rig.load(space, chain) == 20
    await rig.close()


@played
async def test_a_process_that_cannot_be_used_is_told_and_the_directory_opened_anew(
    tmp_path: Path, soon: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = await WorkerRig(tmp_path).open()
    space, chain = rig.namespace(), chain_of("a", 20)
    await rig.store_below([space], chain)
    worker, shelf = worker_of(rig), rig.shelf()
    monkeypatch.setattr(worker, "_open_on", lambda *args: 1 // 0)
    rig.signal(signal.SIGKILL)
    await rig.until(lambda: bool(rig.shelves) and rig.shelf() is not shelf)
    await rig.loaded()
    assert "cannot be used" in caplog.text
    assert await rig.load(space, chain) == 20
    await rig.close()


@pytest.mark.parametrize("when", ["as the daemon starts", "as another one follows"])
@played
async def test_a_process_that_is_stopped_while_it_opens_the_directory_is_killed(
    tmp_path: Path, soon: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    monkeypatch.setattr(pulse, "PING_S", 0.05)
    monkeypatch.setattr(directory_worker, "LIMITS", replace(LIMITS_OF_TESTS, silent_s=1.0))
    stopped, open_on = list[int](), DirectoryWorker._open_on

    def stop(worker: DirectoryWorker, its: HelperProcess, *others: Any) -> Any:
        if not stopped and started:
            stopped.append(its.pid)
            os.kill(its.pid, signal.SIGSTOP)
        return open_on(worker, its, *others)

    monkeypatch.setattr(DirectoryWorker, "_open_on", stop)
    started = when == "as the daemon starts"
    rig = await WorkerRig(tmp_path).open()
    await rig.until(lambda: bool(rig.shelves))
    space, chain = rig.namespace(), chain_of("a", 20)
    await rig.store_below([space], chain)
    if not started:
        started = True
        await rig.replaced(rig.signal(signal.SIGKILL))
    (pid,) = stopped
    assert state_of(pid) == ""
    assert f"{rig.dirs[0]} does not answer: it is killed" in caplog.text
    assert await rig.load(space, chain) == 20
    await rig.close()


@pytest.mark.parametrize("key", [b"", b"first"], ids=["all", "one block"])
@played
async def test_a_change_that_ends_every_process_costs_the_directory_what_it_has_not_confirmed(
    tmp_path: Path, soon: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, key: bytes
) -> None:
    monkeypatch.setattr(directory_worker, "LIMITS", LIMITS_OF_TESTS)
    rig = await WorkerRig(tmp_path).open()
    space, chain, other = rig.namespace(), chain_of("a", 20), chain_of("b", 10)
    await rig.store_below([space], chain)
    await rig.store_below([space], other)
    shelf, catalog, answers = rig.shelf(), rig.catalog(), list[tuple[str, bool]]()
    catalog.delete(-1, lambda ok: answers.append(("poison", ok)))  # no catalog takes that
    key = chain[:KEY_BYTES] if key else b""
    rig.tier.flush(rig.cache.space.all_namespaces(), key, lambda blocks, durable: answers.append(("flush", durable)))
    await rig.until(lambda: bool(rig.shelves) and rig.shelf() is not shelf)
    assert "8 worker processes in a row have ended at once, without writing a row" in caplog.text
    await rig.loaded()
    assert ("flush", True) not in answers, "none has confirmed it"
    assert await rig.load(space, chain) == 0
    assert await rig.load(space, other) == (10 if key else 0)
    await rig.until(lambda: ("flush", False) in answers)
    assert len(answers) == 1
    rig.check()
    await rig.close()
    rig = await WorkerRig(tmp_path).open()
    assert await rig.load(rig.namespace(), chain) == 0
    await rig.close()


@played
async def test_processes_that_are_killed_with_rows_do_not_cost_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_worker, "LIMITS", LIMITS_OF_TESTS)
    rig = await WorkerRig(tmp_path).open()
    space, chain = rig.namespace(), chain_of("a", 20)
    await rig.store_below([space], chain)
    worker, shelf, used = worker_of(rig), rig.shelf(), list[int]()
    use = worker._use

    def use_and_kill(life: directory_worker._Life) -> None:
        use(life)
        used.append(life.its.pid)
        if len(used) <= directory_worker.MAX_FRUITLESS + 2:
            os.kill(life.its.pid, signal.SIGKILL)

    monkeypatch.setattr(worker, "_use", use_and_kill)
    rig.signal(signal.SIGSTOP)
    rig.catalog().delete(1 << 30)
    rig.signal(signal.SIGKILL)
    await rig.committed()
    assert len(used) > directory_worker.MAX_FRUITLESS + 2
    assert rig.shelf() is shelf
    assert await rig.load(space, chain) == 20
    await rig.close()


@played
async def test_rows_of_a_later_process_are_written_as_the_daemon_ends(tmp_path: Path) -> None:
    rig = await WorkerRig(tmp_path).open()
    space, chain = rig.namespace(), chain_of("a", 20)
    await rig.replaced(rig.signal(signal.SIGKILL))
    rig.store(space, chain)
    await rig.until(lambda: rig.tier._writes.idle)
    await rig.close()
    rig = await WorkerRig(tmp_path).open()
    assert await rig.load(rig.namespace(), chain) == 20
    await rig.close()


@played
async def test_many_stopped_processes_hold_up_the_end_no_longer_than_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepers, "CLOSE_S", 0.1)
    monkeypatch.setattr(directory_worker, "END_S", 1.5)
    rig = await WorkerRig(tmp_path, disks=4).open()
    pids = [rig.signal(signal.SIGSTOP, number) for number in range(4)]
    began_s = time.monotonic()
    await rig.close()
    took_s = time.monotonic() - began_s
    assert all(state_of(pid) == "" for pid in pids)
    assert took_s < 4 * 1.5, "each takes that long"


@played
async def test_ends_leave_no_descriptor_thread_or_zombie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_worker, "LIMITS", LIMITS_OF_TESTS)
    await many_ends(tmp_path, 4)


@pytest.mark.stress
@played
async def test_many_ends_leave_no_descriptor_thread_or_zombie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_worker, "LIMITS", LIMITS_OF_TESTS)
    await many_ends(tmp_path, 40)


async def many_ends(root: Path, rounds: int) -> None:
    rig = await WorkerRig(root).open()
    space, chain = rig.namespace(), chain_of("a", 20)
    await rig.store_below([space], chain)
    await rig.replaced(rig.signal(signal.SIGKILL))

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    await rig.until(lambda: worker_of(rig)._opened_by is not None)
    assert await rig.load(space, chain) == 20
    before = held()
    for number in range(rounds):
        if number % 2:
            rig.forget_dram()
            rig.match([space], chain)
        await rig.replaced(rig.signal(signal.SIGKILL))
    assert await rig.load(space, chain) == 20
    await rig.until(lambda: held() <= before)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert [child for child in children if state_of(child) == "Z"] == []
    assert rig.shelf().directory.worker_starts == rounds + 2
    rig.check()
    await rig.close()


@played
async def test_a_directory_that_is_named_by_two_paths_is_refused_as_the_daemon_starts(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir(mode=0o700)
    (tmp_path / "other").symlink_to("one")
    rig = WorkerRig(tmp_path, dirs=[tmp_path / "one", tmp_path / "other"])
    with pytest.raises(ConfigError, match="is another path of one that is named already: name each once"):
        await rig.tier.open()
    await rig.close()


def test_a_key_is_in_no_text_of_a_message() -> None:
    key = bytes(range(32))
    asked = messages.Open("/nvme", 1, 1, key, False, False, None, 1, "")
    assert repr(key) not in repr(asked)
