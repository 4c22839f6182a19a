"""Directories with processes of their own: blocks are good or missing, whatever happens to the processes."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pytest
from chains import chain_of
from played import played
from worker_rig import WorkerRig

from tiercache.daemon.tiers.nvme import shelf as shelf_module
from tiercache.daemon.tiers.nvme.worker import directory_worker
from tiercache.protocol.messages import KEY_BYTES


def is_gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("settings", [{}, {"nvme_codec": "lz4"}, {"disks": 2}], ids=["raw", "lz4", "two directories"])
@played
async def test_blocks_come_back_from_a_process_and_after_a_restart(tmp_path: Path, settings: dict[str, object]) -> None:
    rig = await WorkerRig(tmp_path, **settings).open()
    space, chains = rig.namespace(), [chain_of(str(number), 20) for number in range(4)]
    for chain in chains:
        await rig.store_below([space], chain)
    rig.check()
    for chain in chains:
        assert await rig.load(space, chain) == 20
    pids = [rig.pid(number) for number in range(len(rig.shelves))]
    assert os.getpid() not in pids
    await rig.close()
    assert all(map(is_gone, pids))
    rig = await WorkerRig(tmp_path, **settings).open()
    for chain in chains:
        assert await rig.load(rig.namespace(), chain) == 20
    rig.check()
    await rig.close()


@played
async def test_encrypted_blocks_pass_through_a_process(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("ab" * 32)
    rig = await WorkerRig(tmp_path, nvme_key=key).open()
    space, chain = rig.namespace(), chain_of("sealed", 12)
    await rig.store_below([space], chain)
    key.write_text("cd" * 32)  # the daemon keeps the key that it started with
    await rig.replaced(rig.signal(signal.SIGKILL))
    assert await rig.load(space, chain) == 12
    await rig.close()


@played
async def test_writes_of_a_killed_process_are_made_by_the_next_one(tmp_path: Path) -> None:
    rig = await WorkerRig(tmp_path).open()
    space = rig.namespace()
    chains = [chain_of(str(number), 30) for number in range(4)]
    await rig.store_below([space], chains[0])  # there is a segment
    pid = rig.signal(signal.SIGSTOP)
    for chain in chains[1:]:
        rig.store(space, chain)
    await rig.until(lambda: rig.queue().waits_for_process)
    os.kill(pid, signal.SIGKILL)
    await rig.replaced(pid)
    await rig.settled()
    rig.check()
    rig.forget_dram()
    for chain in chains:
        assert await rig.load(space, chain) == 30
    assert rig.tier.stats()["write_failed_blocks"] == 0
    assert rig.tier.reasons() == []
    await rig.close()
    rig = await WorkerRig(tmp_path).open()
    for chain in chains:
        assert await rig.load(rig.namespace(), chain) == 30
    await rig.close()


@played
async def test_reads_of_a_killed_process_are_misses_and_good_again(tmp_path: Path) -> None:
    rig = await WorkerRig(tmp_path).open()
    space, chain = rig.namespace(), chain_of("a", 60)
    await rig.store_below([space], chain)
    pid = rig.signal(signal.SIGSTOP)
    lease = rig.match([space], chain)
    assert lease is not None
    await rig.until(lambda: rig.queue().waits_for_process)
    os.kill(pid, signal.SIGKILL)
    await rig.until(lambda: lease.over or lease.lease_id not in rig.cache.reads.growing.leases)
    assert rig.read(lease, space) < 60
    await rig.replaced(pid)
    assert await rig.load(space, chain) == 60
    rig.check()
    assert rig.tier.stats()["failed_reads"] == 0, "the disk has not failed"
    await rig.close()


@played
async def test_rows_that_a_killed_process_has_not_confirmed_are_sent_to_the_next_one(tmp_path: Path) -> None:
    rig = await WorkerRig(tmp_path).open()
    space, chain = rig.namespace(), chain_of("a", 40)
    await rig.store_below([space], chain)
    pid = rig.signal(signal.SIGSTOP)
    namespaces = rig.cache.space.all_namespaces()
    answers: list[bool] = []
    rig.tier.flush(namespaces, b"", lambda blocks, durable: answers.append(durable))
    await rig.until(lambda: not rig.shelf().index.is_unlinking)
    assert rig.catalog().pending > 40, "a row for each block is to go"
    os.kill(pid, signal.SIGKILL)
    await rig.until(lambda: bool(answers))
    assert answers == [True]
    await rig.committed()
    await rig.close()
    rig = await WorkerRig(tmp_path).open()
    assert await rig.load(rig.namespace(), chain) == 0
    assert rig.tier.stats()["blocks"] == 0
    await rig.close()


@played
async def test_a_process_that_does_not_answer_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_worker, "HUNG_S", 0.3)
    monkeypatch.setattr(directory_worker, "PING_S", 0.05)
    rig = await WorkerRig(tmp_path).open()
    space, chain = rig.namespace(), chain_of("a", 20)
    await rig.store_below([space], chain)
    pid = rig.signal(signal.SIGSTOP)
    await rig.replaced(pid)
    assert is_gone(pid)
    assert await rig.load(space, chain) == 20
    await rig.close()


@played
async def test_a_process_that_ends_while_a_segment_is_made(tmp_path: Path) -> None:
    rig = await WorkerRig(tmp_path).open()
    space = rig.namespace()
    pid = rig.signal(signal.SIGSTOP)
    chain = chain_of("a", 100)  # more than a segment
    rig.store(space, chain)
    await rig.until(lambda: rig.shelf().slots.growth.under_way)
    os.kill(pid, signal.SIGKILL)
    await rig.settled()
    rig.forget_dram()
    assert await rig.load(space, chain) == 100
    files = sorted(int(path.stem) for path in (rig.dirs[0] / "segments").iterdir())
    assert files == rig.shelf().directory.segments == list(range(1, len(files) + 1)), "none is made twice, none is lost"
    rig.check()
    await rig.close()


@played
async def test_a_directory_that_was_replaced_meanwhile_is_opened_anew(tmp_path: Path, soon: None) -> None:
    rig = await WorkerRig(tmp_path).open()
    space, chain = rig.namespace(), chain_of("a", 20)
    await rig.store_below([space], chain)
    before, pid = rig.shelf(), rig.signal(signal.SIGSTOP)
    shutil.move(rig.dirs[0], tmp_path / "moved")
    (tmp_path / "other").mkdir(mode=0o700)
    os.rename(tmp_path / "other", rig.dirs[0])
    os.kill(pid, signal.SIGKILL)
    await rig.until(lambda: bool(rig.shelves) and rig.shelf() is not before)
    await rig.loaded()
    assert await rig.load(space, chain) == 0
    await rig.store_below([space], chain)
    assert await rig.load(space, chain) == 20
    rig.check()
    await rig.close()


@played
async def test_a_process_that_ends_while_rows_load_is_followed_by_a_fresh_start(
    tmp_path: Path, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf_module, "ROWS_AT_ONCE", 4)  # two batches wait at most, so it cannot have sent all rows
    rig = await WorkerRig(tmp_path).open()
    space, chain = rig.namespace(), chain_of("a", 40)
    await rig.store_below([space], chain)
    await rig.close()
    rig = WorkerRig(tmp_path)
    await rig.tier.open()
    assert rig.shelf().loading
    before = rig.shelf()
    rig.signal(signal.SIGKILL)
    await rig.until(lambda: bool(rig.shelves) and rig.shelf() is not before)
    await rig.loaded()
    assert await rig.load(rig.namespace(), chain) == 40
    await rig.close()


@played
async def test_what_a_process_reads_counts_as_read(tmp_path: Path) -> None:
    rig = await WorkerRig(tmp_path).open()
    space, chain = rig.namespace(), chain_of("a", 1)
    await rig.store_below([space], chain)
    assert await rig.load(space, chain) == 1
    stats = rig.queue().stats()
    assert (stats["reads"], stats["writes"]) == (1, 1)
    await rig.close()


@played
async def test_kills_at_any_time_lose_nothing_that_is_durable(tmp_path: Path) -> None:
    await kills(tmp_path, seed=1, rounds=12)


@pytest.mark.stress
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2, 4))
@played
async def test_many_kills_lose_nothing_that_is_durable(tmp_path: Path, seed: int) -> None:
    await kills(tmp_path, seed, rounds=50)


async def kills(root: Path, seed: int, rounds: int) -> None:
    """Store, load and flush chains while processes are killed or stopped; compare every block."""
    chance = random.Random(seed)
    rig = await WorkerRig(root, disks=2, arena_regions=4, nvme_bytes=48 << 20).open()
    space, durable, loaded = rig.namespace(), dict[bytes, int](), 0
    for number in range(rounds):
        chain = chain_of(str(number), chance.randrange(1, 30))
        rig.store(space, chain)
        if chance.random() < 0.3:
            await rig.settled()
            durable[chain] = len(chain) // KEY_BYTES
        victim = chance.randrange(len(rig.shelves))
        pid = rig.pid(victim)
        if pid and chance.random() < 0.5:
            os.kill(pid, signal.SIGSTOP)
            rig.cache.work()
        if chance.random() < 0.5:
            rig.forget_dram()
        leases = [rig.match([space], other) for other in chance.sample(sorted(durable), min(2, len(durable)))]
        if pid:
            os.kill(pid, signal.SIGKILL)
        for lease in leases:
            if lease is not None:
                await rig.until(lambda: lease.over or lease.lease_id not in rig.cache.reads.growing.leases)  # noqa: B023
                loaded += rig.read(lease, space)
        if pid:
            await rig.replaced(pid, victim)
        if chance.random() < 0.1:
            assert await rig.flush()
            durable.clear()
        rig.check()
    await rig.settled()
    rig.forget_dram()
    left = {chain: await rig.load(space, chain) for chain in durable}
    assert left == durable, "the directories have room for all of them"
    rig.check()
    await rig.close()
    rig = await WorkerRig(root, disks=2, arena_regions=4, nvme_bytes=48 << 20).open()
    assert {chain: await rig.load(rig.namespace(), chain) for chain in durable} == durable
    assert loaded > 0
    await rig.close()
