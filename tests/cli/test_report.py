"""How the command line shows statistics: numbers with their units, sections, tables."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tiercache.cli.report import Section, human, print_sections


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
