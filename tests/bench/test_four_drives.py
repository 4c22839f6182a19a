"""The arithmetic of what a host with four drives would get."""

from __future__ import annotations

import io
import json
import sys

import four_drives
import pytest
from four_drives import Costs, binding, tables

FIGURES = {
    "loop_us_per_block_write_128k_workers": 12.5,
    "own_cpu_s_per_gb_write_128k_workers": 0.2,
    "worker_cpu_s_per_gb_write_128k_workers": 0.4,
    "cpu_s_per_gb_write_128k_workers": 0.8,
    "loop_us_per_block_read_2m_workers": 10.0,
    "own_cpu_s_per_gb_read_2m_workers": 0.02,
    "worker_cpu_s_per_gb_read_2m_workers": 0.05,
    "cpu_s_per_gb_read_2m_workers": 3.2,
}


def test_the_limits_follow_from_the_costs() -> None:
    assert Costs.of(FIGURES, "write", "128k", "_workers").limits_gb_s() == {
        "drives": 28.0,
        "memory": 75.0,
        "loop": pytest.approx(80_000 * 131_072 / 1e9),
        "daemon": pytest.approx(5.0),
        "workers": pytest.approx(10.0),
        "cores": pytest.approx(80.0),
    }


def test_the_lowest_limit_binds() -> None:
    small, large = (Costs.of(FIGURES, *its, "_workers") for its in (("write", "128k"), ("read", "2m")))
    assert binding(small.limits_gb_s()) == ("daemon", pytest.approx(5.0))
    assert binding(large.limits_gb_s()) == ("cores", pytest.approx(20.0))


def test_what_was_not_measured_is_left_out() -> None:
    assert Costs.of(FIGURES, "write", "512k", "_workers").limits_gb_s() == {"drives": 28.0, "memory": 75.0}
    assert not Costs.of(FIGURES, "write", "128k", "").measured
    assert list(tables(FIGURES, "_workers"))[2:4] == [
        "| 128k | write | 12.5 | 0.2 | 0.4 | 0.8 |",
        "| 2m | read | 10 | 0.02 | 0.05 | 3.2 |",
    ]
    assert list(tables(FIGURES, "_workers"))[-1] == (
        "| 2m | read | 28.0 | 75.0 | 209.7 | 50.0 | 80.0 | 20.0 | **20.0 GB/s** | cores |"
    )


def test_figures_of_another_carrier_are_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["four_drives.py", "--suffix", "_aio"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("a table\n" + json.dumps(FIGURES)))
    with pytest.raises(SystemExit, match="no figures that end with '_aio'"):
        four_drives.main()
