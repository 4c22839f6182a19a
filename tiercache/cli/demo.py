"""`tiercache demo`: one long prompt, seven times.

    engine A   cold, then from its own pool
    engine B   a new process: from DRAM; with the daemon killed (-9): computed;
               with the daemon back: from NVMe, which has survived; then from DRAM again;
               all without restarting the engine
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from tiercache.cli.demo_model import build_model, prompt_tokens
from tiercache.client import Client
from tiercache.engine import EngineSettings, describe_model
from tiercache.errors import TierCacheError
from tiercache.launch import LaunchedDaemon, launch
from tiercache.units import format_bytes, format_duration, round_up

ANSWER_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 20.0
BACK_TIMEOUT_S = 20.0
POLL_S = 0.02
_MIB = 1 << 20
SEGMENT_BYTES = 32 * _MIB
_QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}


class Run(NamedTuple):
    """One time through the prompt."""

    name: str
    what: str
    ttft_s: float
    pool_tokens: int
    cache_tokens: int
    tokens: list[int]


class WorkerFailed(TierCacheError):
    """An engine process of the demo ended or did not answer; its own words are on stderr."""


class EngineProcess:
    """An engine in a process of its own, so that nothing survives in memory between two of them."""

    def __init__(self, model: Path, address: str, pool_bytes: int) -> None:
        command = [sys.executable, "-m", "tiercache.cli.demo_worker", str(model), address, str(pool_bytes)]
        # One OpenMP thread: two would spin against the daemon on a small machine.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **_QUIET}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            ready = selector.select(ANSWER_TIMEOUT_S)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise WorkerFailed(f"an engine process {'ended' if ready else 'did not answer'}: see what it says above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """One request and its answer. Raises WorkerFailed after ten minutes without one."""
        assert self._process.stdin is not None
        try:
            print(json.dumps({"do": do, **more}), file=self._process.stdin, flush=True)
        except BrokenPipeError as error:
            raise WorkerFailed("an engine process ended: see what it says above") from error
        return self._answer()

    def run(self, name: str, what: str, tokens: list[int]) -> Run:
        """Serve the prompt once."""
        got = self.ask("generate", tokens=tokens)
        return Run(name, what, got["ttft_s"], got["pool_tokens"], got["cache_tokens"], got["tokens"])

    def close(self) -> None:
        """End of input, then SIGKILL after a while."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class Demo:
    """The prompt's way through pool, DRAM and back; collects a `Run` for each."""

    def __init__(self, model: Path, tokens: list[int], run_dir: Path, console: Console) -> None:
        self.model = model
        self.tokens = tokens
        self.runs: list[Run] = []
        self._run_dir = run_dir
        self._nvme_dir = run_dir.parent / "nvme"
        self._console = console
        namespace, _ = describe_model(model, EngineSettings())
        blocks = len(tokens) // namespace.block_size + 8
        self.kv_bytes = blocks * namespace.block_bytes
        self.arena_bytes = round_up(self.kv_bytes + self.kv_bytes // 4 + 64 * _MIB, 2 * _MIB)

    def play(self) -> None:
        """Everything, in order. Raises TierCacheError when a process of the demo fails."""
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
                raise WorkerFailed(f"the engine did not find the new daemon within {BACK_TIMEOUT_S:.0f} s")

    def _wait_for_disk(self, daemon: LaunchedDaemon) -> None:
        """Until the daemon has written behind what it holds: a daemon that is killed keeps no more."""
        deadline_s = time.monotonic() + BACK_TIMEOUT_S
        with self._console.status("waiting for the blocks to be on NVMe"), Client.connect(
            daemon.address, name="demo", map_arena=False
        ) as client:
            while time.monotonic() < deadline_s:
                tiers = client.stats()["tiers"]
                if tiers["nvme"]["blocks"] >= tiers["dram"]["blocks"]:
                    return
                time.sleep(POLL_S)
        raise WorkerFailed(f"the blocks were not on {self._nvme_dir} within {BACK_TIMEOUT_S:.0f} s: is the disk full?")

    @contextmanager
    def _engine(self, name: str) -> Iterator[EngineProcess]:
        with self._console.status(f"starting {name}"):
            pool_bytes = self.kv_bytes + self.kv_bytes // 8
            engine = EngineProcess(self.model, str(self._run_dir), pool_bytes)
        try:
            yield engine
        finally:
            engine.close()

    @contextmanager
    def _daemon(self) -> Iterator[LaunchedDaemon]:
        with self._console.status("starting the daemon"):
            daemon = launch(
                self.arena_bytes,
                run_dir=self._run_dir,
                nvme=str(self._nvme_dir),
                nvme_size=2 * self.arena_bytes + SEGMENT_BYTES,
                nvme_segment=SEGMENT_BYTES,
                grace=0,
            )
        try:
            yield daemon
        finally:
            daemon.close()


def _table(runs: list[Run], prompt: int) -> Table:
    table = Table(title=f"Time to first token, prompt of {prompt} tokens", title_justify="left")
    table.add_column("run", no_wrap=True)
    for column in ("TTFT", "faster", "pool", "cache", "computed"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            run.what,
            format_duration(run.ttft_s),
            f"{runs[0].ttft_s / run.ttft_s:.1f}x",
            str(run.pool_tokens),
            str(run.cache_tokens),
            str(prompt - run.pool_tokens - run.cache_tokens),
        )
    return table


def _figures(demo: Demo) -> dict[str, Any]:
    runs = {run.name: run for run in demo.runs}
    return {
        **{f"{name}_ttft_s": round(run.ttft_s, 4) for name, run in runs.items()},
        "speedup_dram": round(runs["cold"].ttft_s / runs["dram"].ttft_s, 1),
        "tokens_identical": all(run.tokens == demo.runs[0].tokens for run in demo.runs),
        "hit_tokens": runs["dram"].cache_tokens,
        "nvme_hit_tokens": runs["nvme"].cache_tokens,
        "back_hit_tokens": runs["back"].cache_tokens,
        "prompt_tokens": len(demo.tokens),
        "kv_bytes": demo.kv_bytes,
    }


def run(*, model: Path | None, prompt_file: Path | None, tokens: int, as_json: bool) -> int:
    """Play the demo and print it; exit status 1 when a run gave other tokens or found nothing."""
    console = Console(stderr=True, quiet=as_json)
    with tempfile.TemporaryDirectory(prefix="tiercache-demo-") as folder:
        said = str(model)
        if model is None:
            model = Path(folder) / "model"
            with console.status("building a small model"):
                said = build_model(model)
        prompt, source = prompt_tokens(model, prompt_file, tokens)
        demo = Demo(model, prompt, Path(folder) / "run", console)
        console.print(f"model: {said}\nprompt: {len(prompt)} tokens of {source}, {format_bytes(demo.kv_bytes)} of KV")
        demo.play()
    figures = _figures(demo)
    if not as_json:
        out = Console()
        out.print(_table(demo.runs, len(prompt)))
        same = "the same" if figures["tokens_identical"] else "NOT the same: this is a defect, please report it"
        out.print(f"Generated tokens of all runs are {same}. Pool, cache, computed: tokens of the prompt.")
    print(json.dumps(figures))
    hits = ("hit_tokens", "nvme_hit_tokens", "back_hit_tokens")
    return 0 if figures["tokens_identical"] and all(figures[name] for name in hits) else 1
