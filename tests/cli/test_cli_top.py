"""`tiercache top` on a pseudo-terminal, and `stats --watch`, through the end and the restart of a real daemon."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from terminal import Terminal
from waiting import wait_until

import tiercache
from tiercache.cli.main import main
from tiercache.cli.readings import Change, Reading
from tiercache.cli.top.history import RecentReadings, sparkline
from tiercache.cli.top.view import ViewState, frame

COMMAND = [sys.executable, "-m", "tiercache.cli.main"]
DEADLINE_S = 60.0


class Daemon:
    """Daemons that follow each other in the same run directory."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.start()

    def start(self) -> None:
        flags = ["--run-dir", str(self.run_dir), "--arena", "8MiB", "--lock-memory", "off", "--log-level", "error"]
        nvme = ["--nvme", str(self.run_dir.parent / "kv"), "--nvme-size", "64MiB", "--nvme-segment", "8MiB"]
        self.child = subprocess.Popen([sys.executable, "-m", "tiercache.daemon", *flags, *nvme])

        def starts() -> bool:
            assert self.child.poll() is None
            return (self.run_dir / "session.sock").exists()

        wait_until(starts, "the daemon starts")

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()
        (self.run_dir / "session.sock").unlink(missing_ok=True)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    running = Daemon(tmp_path / "run")
    yield running
    running.kill()


@contextmanager
def traffic(run_dir: Path) -> Iterator[None]:
    """An engine that stores and loads prompts all the time."""
    spec = tiercache.NamespaceSpec(engine="test/1", layout="bytes", dtype="uint8", block_size=4, block_bytes=4096)
    pool = tiercache.Pool.from_blocks(np.zeros((64, 4096), np.uint8))
    stop = threading.Event()

    def run() -> None:
        with tiercache.connect(run_dir, namespace=spec, pool=pool, name="an engine", warn=False) as connector:
            number = 0
            while not stop.is_set():
                number += 1
                chain = tiercache.KeyChain(tiercache.root_key("model"), 4, range(number % 7, number % 7 + 40))
                match = connector.match(chain.packed())
                connector.load(match, list(range(match.blocks)))
                connector.store(chain.packed(), list(range(10)))
                stop.wait(0.01)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_top_on_a_terminal(daemon: Daemon) -> None:
    terminal = Terminal([*COMMAND, "top", "--interval", "0.1", "--address", str(daemon.run_dir)])
    try:
        with traffic(daemon.run_dir):
            wanted = (
                "TIER",
                "dram",
                "nvme",
                "HITS",
                "leases:",
                "queues:",
                "NAMESPACE",
                "HOT PREFIX",
                "CLIENT",
                "an engine",
            )
            lines = terminal.until(lambda lines: all(words in "\n".join(lines) for words in wanted), "all parts")
            assert len(lines) <= 24
            assert max(map(len, lines)) <= 80
            assert "tiercache-cli" not in "\n".join(lines), "`top` does not list itself as a client"
            terminal.until(lambda lines: "▁" in lines[7] or "█" in lines[6], "hits as bars")
        terminal.press("s")
        terminal.shows("NAMESPACE (by hits)")
        terminal.press("?")
        terminal.shows("Any key goes back")
        terminal.press("x")
        terminal.shows("NAMESPACE")
        terminal.resize(50, 12)
        lines = terminal.until(lambda lines: len(lines) <= 12 and max(map(len, lines)) <= 50, "a smaller frame")
        assert "TIER" in "\n".join(lines)
        terminal.resize(80, 24)
        daemon.kill()
        terminal.shows("the daemon is gone; waiting for it")
        daemon.start()
        terminal.shows("restarted 1 times while watching")
        terminal.press("p")
        terminal.shows("paused")
        terminal.press("q")
        assert terminal.wait() == 0
        assert terminal.restored()
    finally:
        terminal.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_top_gives_the_terminal_back_when_it_is_told_to_end(daemon: Daemon, number: int) -> None:
    terminal = Terminal([*COMMAND, "top", "--address", str(daemon.run_dir)])
    try:
        terminal.shows("TIER")
        terminal.child.send_signal(number)
        assert terminal.wait() == 0
        assert terminal.restored()
    finally:
        terminal.close()


def test_top_prints_one_frame_for_pipes(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    with traffic(daemon.run_dir):
        assert main(["top", "--once", "--interval", "0.1", "--address", str(daemon.run_dir)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out
    assert out.splitlines()[1:3] == ["health: ok", out.splitlines()[2]]
    assert "\ndram " in out


def test_top_without_a_terminal_says_what_else_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--address", str(tmp_path)]) == 2
    assert main(["top", "--sort", "size"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("tiercache: top needs a terminal: use `tiercache stats --watch`, or ")
    assert second == "tiercache: --sort size: must be one of: asked, hits, blocks, idle"


# --- stats --watch -----------------------------------------------------------------------------------


def test_watch_goes_on_with_the_next_daemon(daemon: Daemon) -> None:
    command = [*COMMAND, "stats", "--watch", "0.05", "--address", str(daemon.run_dir)]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    plain, as_json = subprocess.Popen(command, **streams), subprocess.Popen([*command, "--json"], **streams)
    try:
        for child in (plain, as_json):
            for _ in range(3):
                child.stdout.readline()
        daemon.kill()
        for child in (plain, as_json):
            while "the daemon is gone, waiting for it: " not in child.stdout.readline():
                pass
        daemon.start()
        lines = [plain.stdout.readline() for _ in range(2)]
        assert "the daemon is back (restarted)" in lines[0], "one line while the daemon is gone"
        assert (lines[0][:2], lines[1][2]) == ("# ", ":")
        events = [json.loads(as_json.stdout.readline()) for _ in range(3)]
        assert [row.get("event") for row in events] == ["back", None, None]
        assert [row.get("restarted") for row in events] == [None, True, False]
        for child in (plain, as_json):
            child.send_signal(signal.SIGTERM)
            _, err = child.communicate(timeout=DEADLINE_S)
            assert (child.returncode, err) == (0, "")
    finally:
        for child in (plain, as_json):
            child.kill()
            child.wait()


# --- the parts ---------------------------------------------------------------------------------------


def tree(generation: int = 1, asked: int = 0, dram: int = 0, below: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "daemon": {"version": "1", "pid": 7, "generation": generation, "uptime_s": 3},
        "health": {"state": "ok", "reasons": []},
        "tiers": {"dram": {"blocks": 1, "bytes": 4096, "capacity_bytes": 8192}, "nvme": {"blocks": 2, "bytes": 9}},
        "traffic": {"asked_tokens": asked, "dram_hit_tokens": dram, "below_hit_tokens": below, "read_bytes": dram},
        **more,
    }


def test_rates_are_of_one_life_of_the_daemon() -> None:
    change = Change(Reading(1.0, tree(asked=100)), Reading(3.0, tree(asked=140)))
    assert (change.rate("traffic.asked_tokens"), change.restarted) == (20, False)
    again = Change(Reading(1.0, tree(asked=100)), Reading(2.0, tree(generation=2, asked=30)))
    assert (again.rate("traffic.asked_tokens"), again.restarted) == (30, True)
    assert again.rate("nothing.like.that") == 0, "a daemon of another release"


def test_hits_are_kept_by_tier_and_interval() -> None:
    history = RecentReadings()
    for second, (asked, dram, below) in enumerate([(0, 0, 0), (100, 50, 0), (100, 50, 0), (200, 75, 75)]):
        history.take(Reading(float(second), tree(1, asked, dram, below)))
    assert [point.share("dram") for point in history.points] == [0.5, None, 0.25]
    assert [point.share("nvme") for point in history.points] == [0.0, None, 0.75]
    assert [point.share("shared") for point in history.points] == [0.0, None, 0.0]
    assert sparkline([0.0, None, 0.5, 1.0], 6) == "  ▁·▅█"
    assert sparkline([0.0, None, 0.5, 1.0], 2) == "▅█"
    assert sparkline([0.1], 0) == ""
    history.take(Reading(9.0, {}, "no answer"))
    assert (history.problem, len(history.points)) == ("no answer", 3)


def test_rows_with_equal_names_are_told_apart() -> None:
    history = RecentReadings()

    def sessions(*loaded: int) -> list[dict[str, Any]]:
        return [{"pid": 5, "name": "rank", "counters": {"loaded_bytes": value}} for value in loaded]

    history.take(Reading(0.0, tree(sessions=sessions(0, 100))))
    keys, names = ("pid", "name"), ("counters.loaded_bytes",)
    assert history.rates("sessions", keys, names) == [None, None]
    history.take(Reading(2.0, tree(sessions=sessions(10, 120, 4))))
    assert history.rates("sessions", keys, names) == [{names[0]: 5.0}, {names[0]: 10.0}, {names[0]: 2.0}]
    assert history.rates("sessions", keys, names, least_s=3.0) == [None] * 3


def test_quotas_and_how_far_they_are_used() -> None:
    history = RecentReadings()
    for second in range(2):
        bytes_of = {"used_bytes": 3 << 20, "limit_bytes": 4 << 20}
        rows = [{"name": "team-a", "tier": "nvme", **bytes_of, "refused_blocks": 7 * second}]
        history.take(Reading(float(second), tree(quotas=rows)))
    lines = [line.plain.split() for line in frame(history, ViewState("/run", 1.0), 100, 40)]
    assert ["QUOTA", "TIER", "USED", "OF", "FULL", "NO", "ROOM/S"] in lines
    assert ["team-a", "nvme", "3.0", "MiB", "4.0", "MiB", "75%", "7"] in lines


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
