"""The durable index after a death at any moment: what was acknowledged is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

FLUSHES = """
import os, sys, threading
from pathlib import Path
from tiercache.daemon.tiers.nvme.catalog.catalog import Catalog
from tiercache.daemon.tiers.nvme.catalog.rows import Row

catalog = Catalog(Path(sys.argv[1]), b"directory number", lambda callback, *args: callback(*args))
catalog.open()
catalog.add_namespace(1, "aa", b"x")
catalog.insert([9], [Row(b"k" * 16, b"p" * 16, 1, 1, 1, 1, 0, 0, 0, 1)])
catalog.sync(20)

def acknowledged(post):
    done = threading.Event()
    post(lambda ok: done.set() if ok else None)
    assert done.wait(20)

for name, post in {
    "insert": lambda done: catalog.insert([8], [Row(b"k" * 16, b"p" * 16, 1, 1, 1, 1, 0, 0, 0, 1)], done),
    "delete": lambda done: catalog.delete([8], done),
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
