"""Upgrade and rollback: an earlier release's clients with this daemon, this one's with its, and their directories.

The earlier release is taken from the repository's history; without that (an archive, a shallow clone) they are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import wait_until

ROOT = Path(__file__).parents[2]
EARLIER = "adc65e4b3405"
"""The last commit of protocol 1 before clients of other hosts, tenants and windows on NVMe."""
NOW = str(ROOT)

CLIENT = """
import json, sys, time, numpy as np, tiercache
pool = np.frombuffer(np.random.default_rng(7).bytes(8 * 5000), np.uint8).reshape(8, 5000).copy()
spec = tiercache.NamespaceSpec(engine="upgrade/1", layout="x", dtype="uint8", block_size=4, block_bytes=5000)
keys = tiercache.KeyChain(tiercache.root_key("a model"), 4, range(16)).packed()
options = {"required": True, "request_timeout_s": 10.0}  # a busy machine is no incompatible one
with tiercache.connect(sys.argv[1], namespace=spec, pool=tiercache.Pool.from_blocks(pool), **options) as cache:
    stored = cache.store(keys, [0, 1, 2, 3]) if "store" in sys.argv else None
    match = cache.match(keys)
    good = cache.load(match, [4, 5, 6, 7][: match.blocks], timeout_s=20.0)
    same = bool(np.array_equal(pool[4 : 4 + good], pool[:good]))
    print(json.dumps([match.blocks, good, same]))
    while "store" in sys.argv and cache.client.stats()["tiers"]["nvme"]["written_blocks"] < 4:
        time.sleep(0.02)  # what is written at a daemon's end is another test's matter
"""


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The earlier release's code."""
    folder = tmp_path_factory.mktemp("earlier")
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", EARLIER, "tiercache", "daemon", "connectors", "kernels"],
        capture_output=True,
        check=False,
        timeout=30,
    )
    if archive.returncode:
        pytest.skip(f"no history with {EARLIER} here: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True, timeout=30)
    return str(folder)


@contextmanager
def daemon(code: str, run_dir: Path, nvme: Path, *more: str) -> Iterator[None]:
    flags = ["--run-dir", str(run_dir), "--arena", "16MiB", "--region", "4MiB", "--nvme", str(nvme)]
    flags += ["--nvme-size", "64MiB", "--nvme-segment", "2MiB", *more]
    its, ours = os.pipe2(os.O_CLOEXEC)  # it ends when we do
    process = subprocess.Popen(
        [sys.executable, "-m", "tiercache.daemon", *flags, "--parent-fd", str(its)],
        env={**os.environ, "PYTHONPATH": code},
        cwd=code,
        pass_fds=[its],
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(its)
    try:
        deadline_s = time.monotonic() + 60
        while not (run_dir / "session.sock").exists():
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        yield
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()
        os.close(ours)


def run_client(code: str, run_dir: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, str(run_dir), *words],
        env={**os.environ, "PYTHONPATH": code},
        cwd=code,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("old_daemon", [False, True])
def test_each_client_with_the_other_daemon(earlier: str, tmp_path: Path, old_daemon: bool) -> None:
    served, guest = (earlier, NOW) if old_daemon else (NOW, earlier)
    with daemon(served, tmp_path / "run", tmp_path / "nvme"):
        assert run_client(guest, tmp_path / "run", "store") == "[4, 4, true]"
        assert run_client(served, tmp_path / "run") == "[4, 4, true]"  # both name the blocks alike
        assert run_client(guest, tmp_path / "run") == "[4, 4, true]"


@pytest.mark.timeout(240)  # eight processes are started, one after another
@pytest.mark.parametrize(
    "workers", ["off", pytest.param("on", marks=pytest.mark.stress)], ids=["in daemon", "worker process"]
)
def test_a_directory_through_an_upgrade_and_back(earlier: str, tmp_path: Path, workers: str) -> None:
    """`workers`: of this release; the earlier one has none."""
    run, nvme = tmp_path / "run", tmp_path / "nvme"
    with daemon(earlier, run, nvme):
        assert run_client(earlier, run, "store") == "[4, 4, true]"
    # A daemon answers while it still loads what an earlier life has left.
    for served, client in ((NOW, NOW), (earlier, earlier), (NOW, earlier)):
        with daemon(served, run, nvme, *(["--nvme-workers", workers] if served == NOW else [])):
            wait_until(lambda client=client: run_client(client, run) == "[4, 4, true]", f"found by {served}")  # type: ignore[misc]
