"""`tiercache ping` and `stats`: rates, sections, numbers with their units."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import COMMAND, DEADLINE_S, Run, assert_refused

from tiercache.cli import stats
from tiercache.cli.report import Section, human, print_sections
from tiercache.cli.stats import what_if_sentence

TREE: dict[str, Any] = {
    "daemon": {"generation": 7},
    "arena": {"bytes": 4 << 30, "used_bytes": 1 << 30},
    "tiers": {"dram": {"blocks": 2, "bytes": 8192}},
    "counters": {"match_requests": 10, "match_blocks_asked": 100, "match_blocks_hit": 60, "stored_blocks": 5},
    "latency": {"match": {"count": 10, "p50_us": 12.0, "p99_us": 300.0}},
    "sessions": [{"name": "engine", "pid": 12}],
}


def test_ping(run: Run, daemon: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = run("ping", "--address", daemon)
    assert status == 0
    assert re.fullmatch(rf"{daemon}: answered in \S+ \S+\n", out)
    monkeypatch.setenv("TIERCACHE_RUN_DIR", str(daemon))
    answer = json.loads(run("ping", "--count", "20", "--json")[1])
    assert (answer["ok"], answer["count"]) == (True, 20)
    assert 0 < answer["min_us"] <= answer["p50_us"] <= answer["p99_us"] <= answer["max_us"]


def test_stats_in_a_pipe_and_as_json(run: Run, daemon: Path) -> None:
    status, out, _ = run("stats", "--address", daemon)
    assert status == 0
    assert out.startswith("# summary\nhealth")
    assert re.search(r"^arena +0 B of 64\.0 MiB used", out, re.MULTILINE)
    tree = json.loads(run("stats", "--json", "--address", daemon)[1])
    assert (tree["arena"]["bytes"], tree["arena"]["bytes_human"]) == (64 << 20, "64.0 MiB")
    _, out, _ = run("stats", "arena", "summary", "--address", daemon)
    assert re.findall("^# (.*)", out, re.MULTILINE)[:2] == ["summary", "arena"]
    assert list(json.loads(run("stats", "arena", "--json", "--address", daemon)[1])) == ["arena"]
    assert_refused(run("stats", "arenas", "--address", daemon), "arenas: is not a section: there are summary, daemon,")


def test_watch_prints_a_line_per_interval_until_it_is_interrupted(daemon: Path) -> None:
    watch = [*COMMAND, "stats", "--watch", "0.02", "--address", str(daemon)]
    with subprocess.Popen(watch, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline().split() for _ in range(23)]
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=DEADLINE_S)
    assert (child.returncode, err) == (0, "")
    assert lines[0][:3] == lines[21][:3] == ["time", "hit%", "matches/s"], "the header comes again"
    assert re.fullmatch(r"\d\d:\d\d:\d\d", lines[1][0])


def test_rates_are_differences_and_start_again_with_a_new_daemon() -> None:
    counts = {"match_blocks_asked": 120, "match_blocks_hit": 71, "match_blocks_below": 4}  # in DRAM, and on NVMe
    later = {**TREE, "counters": {**TREE["counters"], **counts}}
    row = stats.changes(TREE, later, 2.0)
    assert (row["asked_per_s"], row["hit_per_s"], row["hit_rate"], row["stored_per_s"]) == (10, 7.5, 0.75, 0)
    assert (row["blocks"], row["used_bytes"], row["sessions"], row["restarted"]) == (2, 1 << 30, 1, False)
    restarted = stats.changes(TREE, {**later, "daemon": {"generation": 8}}, 1.0)
    assert (restarted["asked_per_s"], restarted["restarted"]) == (120, True)
    assert len(stats.cells(row)) == len(stats._COLUMNS) == len(stats._WIDTHS)
    idle = stats.changes(TREE, TREE, 1.0)
    assert (idle["hit_rate"], stats.cells(idle)[1]) == (None, "-")


def test_what_if_is_said_of_twice_the_dram_and_twice_the_nvme() -> None:
    rates = {1 << 30: 0.25, 2 << 30: 0.375, 7 << 30: 0.5, 13 << 30: 0.625}
    curve = [{"capacity_bytes": size, "hit_rate": rate} for size, rate in rates.items()]
    tree = {"arena": {"bytes": 1 << 30}, "tiers": {"dram": {}, "nvme": {"capacity_bytes": 6 << 30}}}
    said = what_if_sentence({**tree, "what_if": {"window_s": 7200.0, "curve": curve}})
    assert re.findall(r"[\d.]+%", said) == ["37.5%", "25.0%", "50.0%", "62.5%"]
    assert "not enough" in what_if_sentence({**tree, "what_if": {"window_s": 7200.0, "curve": []}})


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("used_bytes", 1 << 30, "1.0 GiB"),
        ("bytes", 4096, "4.0 KiB"),
        ("p99_us", 1500.0, "1.5 ms"),
        ("uptime_s", 90, "90.00 s"),
        ("asked_per_s", 900.04, "900.0/s"),
        ("write_bytes_per_s", 1 << 20, "1.0 MiB/s"),
        ("blocks", 1234567, "1,234,567"),
        ("share", 0.12345, "0.123"),
        ("pid", 12345, "12345"),
        ("generation", 1 << 60, str(1 << 60)),
        ("mapped", True, "yes"),
        ("fault", "", "-"),
        ("list", [1, 2], "1, 2"),
        ("started_unix_s", 1795372549.6, "2026-11-22 18:35:49Z"),
        ("name", "\x1b[31m", "?[31m"),
    ],
)
def test_numbers_are_shown_by_their_unit(name: str, value: Any, shown: str) -> None:
    assert human(name, value) == shown


def test_names_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    names = Section("\x1b]0;a\x07", ("engine\x9b", "rank\r"), [("vllm\x1b[2J", "0\r1"), ("tab\t", "\u202e")])
    print_sections([names])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    print_sections([names])
    out = capsys.readouterr().out
    assert out.count("vllm?[2J") == out.count("0?1") == out.count("tab?") == 2
    assert [text for text in ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\r", "\t", "\u202e") if text in out] == []
