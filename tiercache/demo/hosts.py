"""One prompt on two hosts that share a store: two daemons, each with engines of its own, and a Valkey between them.

host A   computes the prompt and another one; its daemon sends both to the store
host B   the prompt: from the store, then from its own DRAM;
         with the store killed (-9): the other prompt, which only A has now, is computed; the first one is in DRAM still
"""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from tiercache.client.client import Client
from tiercache.client.launcher import LaunchedDaemon, launch
from tiercache.demo.child import ChildFailed
from tiercache.demo.prompt import EngineProcess, Run, arena_bytes_for, prompt_kv_bytes
from tiercache.demo.valkey import ValkeyProcess

STORE_TIMEOUT_S = 120.0
POLL_S = 0.02
LOOKUP_TIMEOUT = "1s"
"""For a demo on a busy machine: the default would make a slow first look-up a miss."""
_PROMPTS = 2


def write_settings(folder: Path, url: str) -> Path:
    """The settings file of all daemons that share a store: its URL, with the password, and the key that they have."""
    key, settings = folder / "shared.key", folder / "hosts.toml"
    for path, text in (
        (key, secrets.token_hex(32)),
        (settings, f'shared = "{url}"\nshared_key = "{key}"\nshared_lookup_timeout = "{LOOKUP_TIMEOUT}"\n'),
    ):
        path.touch(mode=0o600)
        path.write_text(text)
    return settings


def wait_for_store(daemon: LaunchedDaemon) -> None:
    """Wait until all that a host has in DRAM is in the store too. Raises ChildFailed after two minutes."""
    deadline_s = time.monotonic() + STORE_TIMEOUT_S
    with Client.connect(daemon.address, name="demo", map_arena=False) as client:
        while time.monotonic() < deadline_s:
            tiers = client.stats()["tiers"]
            shared = tiers["shared"]
            if shared["written_blocks"] + shared["there_blocks"] >= tiers["dram"]["blocks"]:
                return
            time.sleep(POLL_S)
    raise ChildFailed(f"the blocks were not in the store within {STORE_TIMEOUT_S:.0f} s: see {daemon.log}")


class TwoHosts:
    """Plays it; collects a `Run` of the prompt, or of the other one, for each step.

    worker: an engine's main module. fetched_bytes: what B's daemon had from the store.
    """

    def __init__(self, worker: str, model: Path, tokens: list[int], folder: Path, console: Console) -> None:
        self.tokens = tokens
        self.other = [*tokens[1:], tokens[0]]
        """Has no block in common with the prompt."""
        self.runs: list[Run] = []
        self.fetched_bytes = 0
        self.kv_bytes = prompt_kv_bytes(model, len(tokens))
        self._worker = worker
        self._model = model
        self._folder = folder
        self._console = console

    def play(self) -> None:
        """Do all runs in order. Raises ConfigError without a server, TierCacheError when a process fails."""
        with ExitStack() as stack:
            with self._console.status("starting a Valkey server"):
                store = stack.enter_context(ValkeyProcess(self._folder, 2 * _PROMPTS * self._arena_bytes))
            settings = write_settings(self._folder, store.url)
            a, b = (stack.enter_context(self._daemon(name, settings)) for name in ("a", "b"))
            with self._engine("host A", a) as engine:
                self._run(engine, "cold", "A: computed, and stored", self.tokens)
                self._run(engine, "other", "A: another prompt", self.other)
                engine.ask("drain")
            self._wait_for_store(a)
            with self._engine("host B", b) as engine:
                self._run(engine, "shared", "B: from the shared store", self.tokens)
                self.fetched_bytes = self._shared_stats(b)["fetched_bytes"]
                engine.ask("forget")
                self._run(engine, "dram", "B: from its DRAM", self.tokens)
                store.kill()
                engine.ask("forget")
                self._run(engine, "down", "B, store killed: the other", self.other)
                engine.ask("forget")
                self._run(engine, "local", "B, store killed: its DRAM", self.tokens)

    @property
    def _arena_bytes(self) -> int:
        return arena_bytes_for(_PROMPTS * self.kv_bytes)

    def _run(self, engine: EngineProcess, name: str, what: str, tokens: list[int]) -> None:
        with self._console.status(what):
            self.runs.append(engine.run(name, what, tokens))

    def _wait_for_store(self, daemon: LaunchedDaemon) -> None:
        with self._console.status("waiting for the blocks to be in the store"):
            wait_for_store(daemon)

    def _shared_stats(self, daemon: LaunchedDaemon) -> dict[str, Any]:
        with Client.connect(daemon.address, name="demo", map_arena=False) as client:
            stats: dict[str, Any] = client.stats()["tiers"]["shared"]
            return stats

    def _daemon(self, name: str, settings: Path) -> LaunchedDaemon:
        with self._console.status(f"starting the daemon of host {name.upper()}"):
            return launch(self._arena_bytes, run_dir=self._folder / name, config=str(settings), grace=0)

    def _engine(self, name: str, daemon: LaunchedDaemon) -> EngineProcess:
        pool_bytes = _PROMPTS * self.kv_bytes + self.kv_bytes // 8
        with self._console.status(f"starting the engine of {name}"):
            return EngineProcess(self._worker, self._model, daemon.address, pool_bytes)
