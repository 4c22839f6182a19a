"""One long prompt, six times.

engine A   cold, then from its own pool
engine B   a new process: from DRAM; with the daemon killed (-9): computed;
           with the daemon back: from NVMe, which survived; then from DRAM again;
           all without restarting the engine
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from tiercache.client.client import Client
from tiercache.client.launcher import LaunchedDaemon, launch
from tiercache.demo.child import Child, ChildFailed
from tiercache.engine import EngineSettings, describe_model
from tiercache.ground.units import round_up

ANSWER_TIMEOUT_S = 600.0
BACK_TIMEOUT_S = 20.0
POLL_S = 0.02
_MIB = 1 << 20
SEGMENT_BYTES = 32 * _MIB


class Run(NamedTuple):
    """One run of the prompt."""

    name: str
    what: str
    ttft_s: float
    pool_tokens: int
    cache_tokens: int
    tokens: list[int]


class EngineProcess(Child):
    """An engine in its own process, so that nothing survives in memory from one engine to the next."""

    def __init__(self, worker: str, model: Path, address: str, pool_bytes: int) -> None:
        super().__init__(worker, str(model), address, str(pool_bytes))
        try:
            self._answer()
        except BaseException:
            self.kill()
            raise

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            ready = selector.select(ANSWER_TIMEOUT_S)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            raise ChildFailed(f"an engine process {'ended' if ready else 'did not answer'}: see what it says above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """Send a request and return the answer. Raises ChildFailed after ten minutes without an answer."""
        assert self.process.stdin is not None
        try:
            print(json.dumps({"do": do, **more}), file=self.process.stdin, flush=True)
        except BrokenPipeError as error:
            raise ChildFailed("an engine process ended: see what it says above") from error
        return self._answer()

    def run(self, name: str, what: str, tokens: list[int]) -> Run:
        """Serve the prompt once."""
        got = self.ask("generate", tokens=tokens)
        return Run(name, what, got["ttft_s"], got["pool_tokens"], got["cache_tokens"], got["tokens"])


def prompt_kv_bytes(model: Path, tokens: int) -> int:
    """Bytes of the KV of a prompt, its answer included."""
    namespaces, _ = describe_model(model, EngineSettings())
    blocks = tokens // namespaces[0].block_size + 8
    return blocks * sum(namespace.block_bytes for namespace in namespaces)


def arena_bytes_for(kv_bytes: int) -> int:
    """The size of a DRAM tier that holds that and something else."""
    return round_up(kv_bytes + kv_bytes // 4 + 64 * _MIB, 2 * _MIB)


class LongPrompt:
    """Takes the prompt through pool, DRAM and NVMe; collects a `Run` for each. `worker` is an engine's main module."""

    def __init__(self, worker: str, model: Path, tokens: list[int], run_dir: Path, console: Console) -> None:
        self.worker = worker
        self.model = model
        self.tokens = tokens
        self.runs: list[Run] = []
        self._run_dir = run_dir
        self._nvme_dir = run_dir.parent / "nvme"
        self._console = console
        self.kv_bytes = prompt_kv_bytes(model, len(tokens))
        self.arena_bytes = arena_bytes_for(self.kv_bytes)

    def play(self) -> None:
        """Do all runs in order. Raises TierCacheError when a process of the demo fails."""
        with ExitStack() as daemons:
            daemon = daemons.enter_context(self._daemon())
            with self._engine("engine A") as engine:
                self._run(engine, "cold", "cold: computed, and stored")
                engine.ask("drain")
                self._run(engine, "pool", "same engine: from its pool")
            with self._engine("engine B, a new process") as engine:
                self._run(engine, "dram", "new engine process: from DRAM")
                self._wait_for_disk(daemon)
                os.kill(daemon.pid, signal.SIGKILL)
                engine.ask("forget")
                self._run(engine, "down", "daemon killed (-9): computed")
                daemons.enter_context(self._daemon())
                self._wait_for_cache(engine)
                engine.ask("forget")
                self._run(engine, "nvme", "daemon back: from NVMe")
                engine.ask("forget")
                self._run(engine, "back", "same engine: from DRAM again")

    def _run(self, engine: EngineProcess, name: str, what: str) -> None:
        with self._console.status(what):
            self.runs.append(engine.run(name, what, self.tokens))

    def _wait_for_cache(self, engine: EngineProcess) -> None:
        with self._console.status("waiting for the engine to find the daemon again"):
            if not engine.ask("wait_for_cache", timeout_s=BACK_TIMEOUT_S)["available"]:
                raise ChildFailed(f"the engine did not find the new daemon within {BACK_TIMEOUT_S:.0f} s")

    def _wait_for_disk(self, daemon: LaunchedDaemon) -> None:
        """Wait until the daemon has written all its blocks to NVMe: a killed daemon keeps only these."""
        deadline_s = time.monotonic() + BACK_TIMEOUT_S
        with (
            self._console.status("waiting for the blocks to be on NVMe"),
            Client.connect(daemon.address, name="demo", map_arena=False) as client,
        ):
            while time.monotonic() < deadline_s:
                tiers = client.stats()["tiers"]
                if tiers["nvme"]["blocks"] >= tiers["dram"]["blocks"]:
                    return
                time.sleep(POLL_S)
        raise ChildFailed(f"the blocks were not on {self._nvme_dir} within {BACK_TIMEOUT_S:.0f} s: is the disk full?")

    def _engine(self, name: str) -> EngineProcess:
        with self._console.status(f"starting {name}"):
            return EngineProcess(self.worker, self.model, str(self._run_dir), self.kv_bytes + self.kv_bytes // 8)

    def _daemon(self) -> LaunchedDaemon:
        with self._console.status("starting the daemon"):
            return launch(
                self.arena_bytes,
                run_dir=self._run_dir,
                nvme=str(self._nvme_dir),
                nvme_size=2 * self.arena_bytes + SEGMENT_BYTES,
                nvme_segment=SEGMENT_BYTES,
                grace=0,
            )
