"""Real processes for the fault tests: daemons and clients that can be stopped, killed and brought back."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from waiting import state_of, wait_until

from tiercache.client.client import Client
from tiercache.client.launcher import LaunchedDaemon
from tiercache.errors import DaemonUnavailable

READY_S = 50.0
_HERE = Path(__file__).parent


def stop(pid: int) -> None:
    """SIGSTOP, and wait until it has."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state_of(pid) == "T", f"process {pid} is stopped")


class Daemon:
    """A daemon on a run directory of its own, which lives through its deaths; `life` is the present or last one.

    `patch` is code that runs in the process before the daemon does.
    """

    life: LaunchedDaemon | None = None

    def __init__(self, *flags: str, run_dir: str = "", patch: str = "") -> None:
        self.own_dir = "" if run_dir else tempfile.mkdtemp(prefix="tcf-", dir="/tmp")
        self.run_dir = run_dir or self.own_dir
        self.flags = flags
        self.log_path = Path(tempfile.mkstemp(prefix="tcf-", suffix=".log", dir="/tmp")[1])
        start = f"{patch}\nimport sys\nfrom tiercache.daemon.__main__ import main\nsys.exit(main())"
        self._program = ["-c", start] if patch else ["-m", "tiercache.daemon"]

    @property
    def _its(self) -> LaunchedDaemon:
        assert self.life is not None
        return self.life

    @property
    def pid(self) -> int:
        return self._its.pid

    def launch(self) -> Daemon:
        """Start the process, which ends when this one does, and do not wait for it."""
        if self.life is not None:
            self.life.close()
        command = [sys.executable, *self._program, "--run-dir", self.run_dir, *self.flags]
        self.life = LaunchedDaemon(Path(self.run_dir), False, self.log_path, command)
        return self

    def start(self, *, complete: bool = True) -> Daemon:
        """Start, and wait until it answers and (if `complete`) has all its memory."""
        self.launch()
        wait_until(lambda: self._is_ready(complete), f"the daemon is ready\n{self.log()}", READY_S)
        return self

    def _is_ready(self, complete: bool) -> bool:
        assert self._its.poll() is None, f"the daemon ended\n{self.log()}"
        with suppress(DaemonUnavailable):
            arena = self.stats()["arena"]
            return bool(arena["populated_bytes"] == arena["bytes"]) or not complete
        return False

    def stop(self) -> None:
        stop(self.pid)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._its.kill()

    def restart(self) -> Daemon:
        self.kill()
        return self.start()

    def status(self) -> int:
        wait_until(lambda: self._its.poll() is not None, "the daemon has ended", READY_S)
        return self._its.poll() or 0

    def terminate(self) -> int:
        os.kill(self.pid, signal.SIGTERM)
        return self.status()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def stats(self) -> dict[str, Any]:
        with Client.connect(self.run_dir, name="stats", map_arena=False) as client:
            return client.stats()

    def close(self) -> None:
        if self.life is not None:
            self.life.kill()
            self.life.close()
        if self.own_dir:
            shutil.rmtree(self.own_dir, ignore_errors=True)
        self.log_path.unlink(missing_ok=True)


class Child:
    """A client in a process of its own, told what to do line by line (`fault_child.py`)."""

    def __init__(self, kind: str, run_dir: str, **settings: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_HERE / "fault_child.py"), kind, run_dir, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._read = b""
        self.pid = self._process.pid

    def tell(self, command: str, **arguments: Any) -> None:
        """Give an order and do not wait."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, arguments]).encode() + b"\n")

    def hear(self, timeout_s: float = 60.0) -> Any:
        """The answer to the oldest order."""
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._read:
            left_s = max(0.0, deadline_s - time.monotonic())
            ready = select.select([self._process.stdout], [], [], left_s)[0]
            assert ready, f"child {self.pid} does not answer"
            got = os.read(self._process.stdout.fileno(), 1 << 20)
            assert got, f"child {self.pid} ended with {self._process.wait(READY_S)}"
            self._read += got
        line, _, self._read = self._read.partition(b"\n")
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def do(self, command: str, *, timeout_s: float = 60.0, **arguments: Any) -> Any:
        """Give an order and wait for its answer."""
        self.tell(command, **arguments)
        return self.hear(timeout_s)

    def stop(self) -> None:
        stop(self.pid)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(READY_S)

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
