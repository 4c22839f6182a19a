"""What takes turns in `bench_nvme.py`: daemons with their clients, and what a pass of one of them costs."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from common import Daemon, wait_populated
from disk_limit import MIB, DiskLimit
from nvme_worker import ASKED_OFTEN, COPY_BLOCKS, DEADLINE_S, Child

DATA_BYTES = 1 << 30
CHAINS_OF_SEVERAL = 16
"""Chains of a case with several directories: each lives in one of them, by a hash."""
HEAD = 16
"""Blocks that chains with one beginning have in common."""


class Case(NamedTuple):
    """The data stored and loaded in a round; `nvme_bytes` bounds the directories."""

    name: str
    label: str
    block_bytes: int
    rounds: int
    nvme_bytes: int
    keep: bool = False
    """Whether the blocks of older rounds stay: then the directory is full after the warm-up, and every write evicts."""
    chains: int = 1
    head: int = 0
    """How many first blocks all chains have in common."""

    @property
    def blocks(self) -> int:
        return DATA_BYTES // self.block_bytes


class Carrier(NamedTuple):
    """What does the I/O. Empty: the daemon's default."""

    workers: str = ""
    io: str = ""

    @property
    def suffix(self) -> str:
        """Of the keys of its figures: empty for the daemon's own threads."""
        return ("_workers" if self.workers == "on" else "") + (f"_{self.io}" if self.io else "")

    @property
    def label(self) -> str:
        """For the table."""
        return self.suffix.replace("_", ", ", 1).replace("_", " ")

    @property
    def settings(self) -> dict[str, str]:
        """For the daemon."""
        return {f"nvme_{name}": value for name, value in self._asdict().items() if value}


def carriers(workers: str, io: str) -> list[Carrier]:
    """Those that options ask for: `both` means two of a kind, empty the default."""
    kinds = ("off", "on") if workers == "both" else (workers,)
    return [Carrier(*pair) for pair in product(kinds, ("threads", "aio") if io == "both" else (io,))]


# --- CPU time -------------------------------------------------------------------------------------


def exact_cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, by its clock (Linux numbers these after the process)."""
    return time.clock_gettime((~pid << 3) | 2)


def children_of(pid: int) -> list[int]:
    """The processes that a process has started and that are not gone."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for tasks in found for child in tasks.read_text().split())


def main_thread_cpu_s(pid: int) -> float:
    """CPU seconds of a process's main thread so far: in a daemon, of its event loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


class CpuTimes(NamedTuple):
    """CPU seconds of a daemon so far, or in a pass: all its threads, its worker processes, its loop's thread."""

    daemon_s: float
    workers_s: float
    loop_s: float

    @classmethod
    def of(cls, pid: int, workers: Sequence[int]) -> CpuTimes:
        """Of a daemon until now."""
        return cls(exact_cpu_s(pid), sum(map(exact_cpu_s, workers)), main_thread_cpu_s(pid))

    def since(self, before: CpuTimes) -> CpuTimes:
        """What was spent after an earlier reading."""
        return CpuTimes(*(now - then for now, then in zip(self, before, strict=True)))

    def without(self, polls: int, poll: CpuTimes) -> CpuTimes:
        """Besides so many requests for statistics, each of which costs `poll`."""
        return CpuTimes(*(all_s - polls * one_s for all_s, one_s in zip(self, poll, strict=True)))


# --- passes ---------------------------------------------------------------------------------------


class Round(NamedTuple):
    """One pass: seconds and CPU seconds of the tier for `DATA_BYTES`, GB/s of the disk around it."""

    seconds: float
    disk_gb_s: float
    cpu: CpuTimes
    client_cpu_s: float
    """Besides its copy."""
    block_bytes: int
    answer: dict[str, Any]

    @property
    def gb_s(self) -> float:
        return DATA_BYTES / self.seconds / 1e9

    @property
    def ratio(self) -> float:
        return self.gb_s / self.disk_gb_s

    @property
    def cpu_s_per_gb(self) -> float:
        """Of daemon, workers and client, without the client's copy."""
        return (self.cpu.daemon_s + self.cpu.workers_s + self.client_cpu_s) / (DATA_BYTES / 1e9)

    @property
    def own_cpu_s_per_gb(self) -> float:
        """Of the daemon's own process."""
        return self.cpu.daemon_s / (DATA_BYTES / 1e9)

    @property
    def worker_cpu_s_per_gb(self) -> float:
        """Of its worker processes."""
        return self.cpu.workers_s / (DATA_BYTES / 1e9)

    @property
    def loop_us_per_block(self) -> float:
        """Of the daemon's loop, whatever it does meanwhile."""
        return self.cpu.loop_s * 1e6 / (DATA_BYTES // self.block_bytes)


class Rig:
    """A daemon with empty directories, its client, and the passes that they have made."""

    def __init__(
        self, stack: ExitStack, where: Path, case: Case, name: str, settings: Mapping[str, str], directories: int = 1
    ) -> None:
        self.writes: list[Round] = []
        self.reads: list[Round] = []
        self._case = case
        self.daemon = stack.enter_context(make_daemon(where, case, name, settings, directories))
        self._workers = children_of(self.daemon.pid)
        client = Child(
            "client", self.daemon.directory, case.block_bytes, case.blocks, chains=case.chains, head=case.head
        )
        self._client = stack.enter_context(closing(client))
        for word in ("renew", "write", "forget_dram", "read"):  # the first writes into a segment cost more
            client.ask(word)
        if case.keep:
            for word in ("renew", "write"):
                client.ask(word)
        self._copy_cpu_s = min(client.ask("copy")["cpu_s"] for _ in range(2))

        before = CpuTimes.of(self.daemon.pid, self._workers)
        self._poll_client_cpu_s = client.ask("ask_often")["cpu_s"] / ASKED_OFTEN
        polls = CpuTimes.of(self.daemon.pid, self._workers).since(before)
        self._poll = CpuTimes(*(cpu_s / ASKED_OFTEN for cpu_s in polls))

    def take_turn(self, disk: DiskLimit) -> None:
        """A pass of writes, and one of reads."""
        if not self._case.keep:
            self._client.ask("forget")
        self._client.ask("renew")
        self.writes.append(self._pass("write", disk))
        if not self._case.keep:
            self._client.ask("forget_dram")
            self.reads.append(self._pass("read", disk))

    def _pass(self, step: str, disk: DiskLimit) -> Round:
        """One pass of the tier between two of the disk."""
        block_bytes = self._case.block_bytes
        plain = disk.write_gb_s if step == "write" else disk.read_gb_s
        disk_before = plain(block_bytes)
        before = CpuTimes.of(self.daemon.pid, self._workers)
        answer = self._client.ask(step)
        if children_of(self.daemon.pid) != self._workers:
            raise RuntimeError("a worker process was replaced during a pass")
        cpu = CpuTimes.of(self.daemon.pid, self._workers).since(before)
        disk_gb_s = (disk_before + plain(block_bytes)) / 2
        polls = int(answer["polls"])
        client_cpu_s = answer["cpu_s"] - self._copy_cpu_s - (polls * self._poll_client_cpu_s if step == "write" else 0)
        return Round(answer["seconds"], disk_gb_s, cpu.without(polls, self._poll), client_cpu_s, block_bytes, answer)


def take_turns(rigs: Sequence[Rig], rounds: int, disk: DiskLimit, end_s: float) -> None:
    """Rounds of all rigs, every other one in the opposite order; no third one begins after `end_s`."""
    for number in range(rounds):
        if time.perf_counter() > end_s and number > 1:
            return
        for rig in rigs if number % 2 else reversed(rigs):
            rig.take_turn(disk)


def make_daemon(where: Path, case: Case, name: str, settings: Mapping[str, str], directories: int = 1) -> Daemon:
    """A daemon with empty directories below `where`."""
    paths = [where / f"{name}-{number}" for number in range(directories)]
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    arena = (DATA_BYTES + 2 * COPY_BLOCKS * case.block_bytes) // MIB + 2
    daemon = Daemon(
        f"{arena}MiB",
        nvme=",".join(map(str, paths)),
        nvme_size=f"{case.nvme_bytes // MIB}MiB",
        **{"nvme_segment": "512MiB" if directories == 1 else "256MiB", **settings},
    )
    try:
        _await_directories(daemon)
    except BaseException:
        daemon.close()
        raise
    return daemon


def _await_directories(daemon: Daemon) -> None:
    """Wait until the arena is populated and every directory is open. Raises RuntimeError."""
    with daemon.connect() as client:
        wait_populated(client)
        deadline = time.perf_counter() + DEADLINE_S
        found = client.stats()["tiers"]["nvme"]["directories"]
        while any(one["state"] != "ok" for one in found):
            if time.perf_counter() > deadline:
                raise RuntimeError("a directory does not open")
            time.sleep(0.01)
            found = client.stats()["tiers"]["nvme"]["directories"]
        if not all(one["direct"] for one in found):
            raise RuntimeError("this file system refuses O_DIRECT: choose another one with --dir")


def paired_ratios(over: Sequence[Round], one: Sequence[Round]) -> list[float]:
    """Speed over speed, round by round."""
    return [its.gb_s / other.gb_s for its, other in zip(over, one, strict=True)]


def medians(rounds: Sequence[Round], name: str) -> tuple[float, list[float]]:
    """The median of an attribute, and all its values."""
    values = [float(getattr(one, name)) for one in rounds]
    return statistics.median(values), values


def make_key_file(path: Path) -> Path:
    """A new key for `nvme_key`."""
    path.touch(mode=0o600)
    path.write_text(os.urandom(32).hex())
    return path
