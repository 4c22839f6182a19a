"""`tiercache top` and `stats --watch`: their parts, and on a pseudo-terminal through a restart of a real daemon."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import COMMAND, run_process
from terminal import Terminal

import tiercache
from tiercache.cli.readings import Reading
from tiercache.cli.top.history import RecentReadings
from tiercache.cli.top.view import ViewState, frame

PARTS = ("TIER", "dram", "nvme", "HITS", "leases:", "queues:", "NAMESPACE", "HOT PREFIX", "CLIENT", "an engine")


def tree(generation: int = 1, asked: int = 0, dram: int = 0, below: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "daemon": {"version": "1", "pid": 7, "generation": generation, "uptime_s": 3},
        "health": {"state": "ok", "reasons": []},
        "tiers": {"dram": {"blocks": 1, "bytes": 4096, "capacity_bytes": 8192}, "nvme": {"blocks": 2, "bytes": 9}},
        "traffic": {"asked_tokens": asked, "dram_hit_tokens": dram, "below_hit_tokens": below, "read_bytes": dram},
        **more,
    }


@pytest.mark.parametrize(("width", "height"), [(80, 24), (20, 5), (1, 1), (200, 60)])
def test_a_frame_fits_whatever_there_is(width: int, height: int) -> None:
    history = RecentReadings()
    spaces = [
        {"id": number, "fingerprint": "f" * 32, "engine": "e\x1b[2J" * 9, "rank": "tp 0/1", "blocks": number}
        for number in range(50)
    ]
    reasons = ["a disk\x1b[2J hangs " * 20] * 5
    for second in range(3):
        now = tree(1, 10 * second, 5 * second, namespaces=spaces, sessions=[{"name": "c", "pid": 1}] * 30)
        history.take(Reading(float(second), {**now, "health": {"state": "degraded", "reasons": reasons}}))
    lines = [line.plain for line in frame(history, ViewState("/run", 1.0), width, height)]
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert "\x1b" not in "".join(lines)
    if (width, height) == (80, 24):
        assert "and 2 more: tiercache stats" in "\n".join(lines)
        assert sum(line.strip().startswith("and ") for line in lines) == 3, "lists that were cut say so"


def test_one_frame_is_printed_for_a_pipe_in_any_locale(daemon: Path) -> None:
    done = run_process("top", "--once", "--interval", "0.1", "--address", daemon, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr, "\x1b" in done.stdout) == (0, "", False)
    assert done.stdout.splitlines()[1].startswith("health: ")
    assert "\ndram " in done.stdout


def ask(engine: tiercache.Connector, number: int) -> None:
    """One prompt: loaded as far as it is there, and stored."""
    keys = tiercache.KeyChain(tiercache.root_key("model"), 4, range(number % 7, number % 7 + 40)).packed()
    match = engine.match(keys)
    engine.load(match, list(range(match.blocks)))
    engine.store(keys, list(range(10)))


@pytest.mark.stress
def test_top_on_a_terminal(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"nvme": str(tmp_path / "kv"), "nvme_size": "64MiB", "nvme_segment": "8MiB"}
    spec = tiercache.NamespaceSpec(engine="test/1", layout="bytes", dtype="uint8", block_size=4, block_bytes=4096)
    pool, numbers = tiercache.Pool.from_blocks(np.zeros((64, 4096), np.uint8)), itertools.count()
    with (
        tiercache.launch("8MiB", **settings) as lives,
        Terminal([*COMMAND, "top", "--interval", "0.1", "--address", lives.address]) as terminal,
    ):
        with tiercache.connect(
            lives.address, namespace=spec, pool=pool, name="an engine", required=True, request_timeout_s=60.0
        ) as engine:

            def until(condition: Callable[[list[str]], bool], what: str) -> list[str]:

                def asked(lines: list[str]) -> bool:
                    """With a prompt at each frame."""
                    ask(engine, next(numbers))
                    return condition(lines)

                return terminal.until(asked, what)

            lines = until(lambda lines: all(words in "\n".join(lines) for words in PARTS), "all parts")
            assert (len(lines) <= 24, max(map(len, lines)) <= 80) == (True, True)
            assert "tiercache-cli" not in "\n".join(lines), "`top` does not list itself as a client"
            until(lambda lines: "▁" in lines[7] or "█" in lines[6], "hits as bars")
        for key, words in (("s", "NAMESPACE (by hits)"), ("?", "Any key goes back"), ("x", "NAMESPACE")):
            terminal.press(key)
            terminal.shows(words)
        terminal.resize(50, 12)
        lines = terminal.until(lambda lines: len(lines) <= 12 and max(map(len, lines)) <= 50, "a smaller frame")
        assert "TIER" in "\n".join(lines)
        terminal.resize(80, 24)
        lives.kill()
        terminal.shows("the daemon is gone; waiting for it")
        lives.restart()
        terminal.shows("restarted 1 times while watching")
        terminal.press("p")
        terminal.shows("paused")
        terminal.press("q")
        assert (terminal.wait(), terminal.restored()) == (0, True)


def test_top_gives_the_terminal_back_when_it_is_told_to_end(daemon: Path) -> None:
    with Terminal([*COMMAND, "top", "--address", str(daemon)]) as terminal:
        terminal.shows("TIER")
        terminal.child.send_signal(signal.SIGTERM)
        assert (terminal.wait(), terminal.restored()) == (0, True)
