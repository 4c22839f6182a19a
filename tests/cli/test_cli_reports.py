"""How the command line shows statistics: numbers with their units, sections, tables, rates."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tiercache.cli import flush, stats
from tiercache.cli.report import Section, align, fitting, human, print_sections, sections, with_human
from tiercache.errors import ConfigError

TREE: dict[str, Any] = {
    "daemon": {"version": "1", "generation": 7, "uptime_s": 90, "loop": {"ticks": 1234, "max_us": 1500.0}},
    "arena": {"bytes": 4 << 30, "used_bytes": 1 << 30, "classes": [{"frame_bytes": 4096, "used": 2}]},
    "tiers": {"dram": {"blocks": 2, "bytes": 8192}},
    "counters": {"match_requests": 10, "match_blocks_asked": 100, "match_blocks_hit": 60, "stored_blocks": 5},
    "latency": {"match": {"count": 10, "p50_us": 12.0, "p99_us": 300.0}, "stats": {"count": 1, "p99_us": 5}},
    "namespaces": [],
    "sessions": [{"name": "engine\x1b[31m", "pid": 12}],
}


def test_numbers_are_shown_by_their_unit() -> None:
    assert human("used_bytes", 1 << 30) == "1.0 GiB"
    assert human("bytes", 4096) == "4.0 KiB"
    assert (human("p99_us", 1500.0), human("uptime_s", 90)) == ("1.5 ms", "90.00 s")
    assert (human("blocks", 1234567), human("share", 0.12345)) == ("1,234,567", "0.123")
    assert (human("pid", 12345), human("generation", 1 << 60)) == ("12345", str(1 << 60))
    assert (human("mapped", True), human("fault", ""), human("list", [1, 2])) == ("yes", "-", "1, 2")
    assert human("started_unix_s", 1795372549.6) == "2026-11-22 18:35:49Z"
    assert "\x1b" not in human("name", "\x1b[31m")
    assert len(human("text", "x" * 1000)) == 60


def test_json_has_raw_and_human_numbers() -> None:
    tree = with_human(TREE)
    assert tree["arena"]["used_bytes"] == 1 << 30
    assert tree["arena"]["used_bytes_human"] == "1.0 GiB"
    assert tree["arena"]["classes"][0]["frame_bytes_human"] == "4.0 KiB"
    assert "match_requests_human" not in tree["counters"]
    assert json.loads(json.dumps(tree)) == tree


def test_a_tree_becomes_sections() -> None:
    found = {section.title: section for section in sections(TREE)}
    assert list(found)[:3] == ["daemon", "arena", "arena classes"]
    assert list(found)[3:] == ["tiers", "counters", "latency", "namespaces", "sessions"]
    assert ("loop.ticks", "1,234") in found["daemon"].rows
    assert found["arena classes"] == Section("arena classes", ("frame_bytes", "used"), [("4.0 KiB", "2")])
    assert found["latency"].columns == ("latency", "count", "p50_us", "p99_us")
    assert found["latency"].rows[1] == ("stats", "1", "-", "5 us")
    assert found["namespaces"].rows == [("none", "")]
    assert sections({"age_s": 2, "tiers": {}})[0] == Section("general", ("", ""), [("age_s", "2.00 s")])


def test_reasons_are_shown_whole_and_each_in_its_line() -> None:
    """Long messages are not cut: their ends say what to do."""
    reasons = [f"nvme directory /mnt/nvme{number} cannot be used: {'why ' * 20}\x1b: mount it" for number in range(2)]
    [found] = sections({"health": {"state": "degraded", "reasons": reasons, "parts": {"nvme": 2}}})
    first, second = [reason.replace("\x1b", "?") for reason in reasons]
    assert found.rows == [("state", "degraded"), ("reasons", first), ("", second), ("parts.nvme", "2")]


def test_few_rows_with_many_figures_stand_beside_each_other() -> None:
    figures = {f"figure_{number}": number for number in range(20)}
    [found] = sections({"tiers": {"dram": {"blocks": 2}, "nvme": {"blocks": 3, **figures}}})
    assert found.columns == ("tiers", "dram", "nvme")
    assert found.rows[:2] == [("blocks", "2", "3"), ("figure_0", "-", "0")]


def test_tables_within_a_table_stand_below_it_and_figures_within_a_row_beside_it() -> None:
    disk = {"path": "/mnt/a", "latency": {"read": {"p99_us": 5}}, "none": {}}
    found = sections({"tiers": {"nvme": {"blocks": 3, "directories": [disk]}}})
    assert found == [
        Section("tiers", ("tiers", "blocks"), [("nvme", "3")]),
        Section("tiers nvme directories", ("path", "latency.read.p99_us"), [("/mnt/a", "5 us")]),
    ]


def test_a_table_that_is_too_wide_is_turned_or_cut_into_several() -> None:
    columns = tuple(f"column{number}" for number in range(6))
    wide = Section("wide", columns, [tuple("1234567" for _ in columns)])
    assert fitting(wide, 80) == [wide]
    assert fitting(wide, 40) == [Section("wide", ("column0", "1234567"), [(name, "1234567") for name in columns[1:]])]
    long = wide._replace(rows=wide.rows * 9)
    assert [(part.title, part.columns) for part in fitting(long, 40)] == [
        ("wide (1 of 3)", ("column0", "column1", "column2")),
        ("wide (2 of 3)", ("column0", "column3", "column4")),
        ("wide (3 of 3)", ("column0", "column5")),
    ]
    pairs = Section("pairs", ("", ""), [("name", "x" * 60)])
    assert fitting(pairs, 40) == [pairs]


def test_a_narrow_terminal_gets_the_columns_that_matter_most() -> None:
    assert stats.shown_columns(None) == list(range(len(stats._COLUMNS)))
    narrow = stats.shown_columns(80)
    assert [stats._COLUMNS[place] for place in narrow] == [
        "time",
        "hit%",
        "asked/s",
        "hit/s",
        "stored/s",
        "evicted/s",
        "used",
        "match p99",
    ]
    assert sum(stats._WIDTHS[place] + 1 for place in narrow) - 1 <= 80


def test_the_hit_rate_is_of_all_tiers() -> None:
    counters = {"match_blocks_asked": 100, "match_blocks_hit": 40, "match_blocks_below": 20}
    assert ("hit rate", "60.0% of 100 blocks asked for, 20.0% from NVMe") in stats.summary({"counters": counters}).rows
    counters["match_blocks_shared"] = 15
    told = "60.0% of 100 blocks asked for, 5.0% from NVMe, 15.0% from the shared store"
    assert ("hit rate", told) in stats.summary({"counters": counters}).rows


def test_names_of_clients_cannot_control_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Section("\x1b]0;a\x07", ("engine\x9b", "rank\r"), [("vllm\x1b[2J", "0\r1"), ("tab\t", "\u202e")])
    print_sections([names])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    print_sections([names])
    out = capsys.readouterr().out
    assert out.count("vllm?[2J") == out.count("0?1") == out.count("tab?") == 2
    assert [text for text in ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\r", "\t", "\u202e") if text in out] == []


def test_piped_text_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = Section("a", ("", ""), [("x", "1"), ("long", "20")])
    print_sections([pairs, Section("b", ("n", "v"), [("k", "w")])])
    assert capsys.readouterr().out == "# a\nx      1\nlong  20\n\n# b\nn  v\nk  w\n"
    assert align([("a", "1"), ("bb", "22")], [True, False]) == [" a  1", "bb  22"]


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


def test_namespaces_are_found_by_number_or_start_of_fingerprint() -> None:
    tree = {"namespaces": [{"id": 1, "fingerprint": "2abc"}, {"id": 2, "fingerprint": "2abd"}]}
    assert flush.find_namespace(tree, "2") == 2
    assert flush.find_namespace(tree, "2ABC") == 1
    with pytest.raises(ConfigError, match=r"2ab: is the start of 2 fingerprints: .* 1 \(2abc\), 2 \(2abd\)"):
        flush.find_namespace(tree, "2ab")
    for nothing in ("3", "", "9f"):
        with pytest.raises(ConfigError, match="no such namespace"):
            flush.find_namespace(tree, nothing)
