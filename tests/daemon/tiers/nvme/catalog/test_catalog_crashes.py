"""The durable index after a death at any moment: what was acknowledged is there."""

from __future__ import annotations

import os
import random
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from catalog_bench import WAIT_S, Bench

from tiercache.daemon.tiers.nvme.catalog.rows import Row

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
CHILD = Path(__file__).with_name("catalog_child.py")

FLUSHES = """
import os, sys, threading
from pathlib import Path
from tiercache.daemon.tiers.nvme.catalog.catalog import Catalog
from tiercache.daemon.tiers.nvme.catalog.rows import Row

catalog = Catalog(Path(sys.argv[1]), b"directory number", lambda callback, *args: callback(*args))
catalog.open()
catalog.add_namespace(1, "aa", b"x")
catalog.insert(9, Row(b"k" * 16, b"p" * 16, 1, 1, 1, 1, 0, 0, 0, 1))
catalog.sync(20)

def acknowledged(post):
    done = threading.Event()
    post(lambda ok: done.set() if ok else None)
    assert done.wait(20)

for name, post in {
    "insert": lambda done: catalog.insert(8, Row(b"k" * 16, b"p" * 16, 1, 1, 1, 1, 0, 0, 0, 1), done),
    "delete": lambda done: catalog.delete(8, done),
    "epoch": lambda done: catalog.raise_epoch(1, 1, done),
    "tombstone": lambda done: catalog.add_tombstone(1, b"k" * 16, 1, done),
    "sync": lambda done: done(catalog.sync(20)),
}.items():
    os.write(1, f"step {name}\\n".encode())
    acknowledged(post)
os.write(1, b"step end\\n")
catalog.close(20)
"""


def test_a_flush_is_on_the_disk_before_it_is_acknowledged(tmp_path: Path) -> None:
    """Changes that need not be durable do not wait for the disk; the system calls of a child process show it."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    done = subprocess.run(
        ["strace", "-f", "-e", "trace=write,fsync,fdatasync", sys.executable, "-c", FLUSHES, str(tmp_path)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "ptrace" in done.stderr and done.returncode != 0:
        pytest.skip("may not trace system calls here")
    assert done.returncode == 0, done.stderr
    steps = done.stderr.split('"step ')[1:]
    synced = {step.split("\\n")[0]: "sync(" in step for step in steps[:-1]}
    assert synced == {"insert": False, "delete": False, "epoch": True, "tombstone": True, "sync": True}


def run_and_kill(directory: Path, seed: int, rng: random.Random) -> int:
    """One life of the child; returns how many changes were acknowledged."""
    command = [sys.executable, str(CHILD), str(directory), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT) as child:
        assert child.stdout is not None
        try:
            acknowledged = 0
            enough = rng.choice((0, 1, rng.randrange(100), rng.randrange(20_000)))
            if enough == 0:
                select.select([child.stdout], [], [], 0.3 * rng.random())  # killed somewhere in its start
            while acknowledged < 4 * enough:
                got = os.read(child.stdout.fileno(), 4 * rng.randrange(1, 5000))
                assert got, "the child died by itself"
                acknowledged += len(got)
        finally:
            child.kill()
        return (acknowledged + len(child.stdout.read())) // 4


def kill_rounds(directory: Path, rounds: int, seed: int) -> int:
    """Let a child work and kill it, over and over; returns how many changes were acknowledged in all."""
    from catalog_child import Model  # the child's own file, so that both agree on the schedule

    rng = random.Random(seed)
    start: dict[int, Row] = {}
    acknowledged_in_all = 0
    for number in range(rounds):
        acknowledged = run_and_kill(directory, seed + number, rng)
        acknowledged_in_all += acknowledged

        bench = Bench(directory)
        catalog, state = bench.open()
        assert not state.fresh or (acknowledged == 0 and not start)
        found = bench.rows(catalog)
        assert catalog.close(WAIT_S)
        model = Model(seed + number, start)
        for _ in range(acknowledged):
            model.step()
        # Some that were not acknowledged may have been written, in order and without a gap.
        for _ in range(100_000):
            if len(model.rows) == len(found) and model.rows == found:
                break
            model.step()
        else:
            pytest.fail(f"round {number}: after {acknowledged} acknowledged changes the rows are those of no moment")
        assert state.next_sequence > max((its.sequence for its in found.values()), default=0)
        start = found
    assert bench.set_aside() == []
    return acknowledged_in_all


@pytest.fixture
def child_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CHILD.parent))


@pytest.mark.stress
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("child_path")
def test_killed_at_any_moment_for_long(tmp_path: Path) -> None:
    assert kill_rounds(tmp_path, rounds=300, seed=1000) > 10_000
