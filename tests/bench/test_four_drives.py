"""The arithmetic of what a host with four drives would get."""

from __future__ import annotations

import pytest
from four_drives import Costs, binding, tables

FIGURES = {
    "loop_us_per_block_write_128k_workers": 12.5,
    "own_cpu_s_per_gb_write_128k_workers": 0.2,
    "worker_cpu_s_per_gb_write_128k_workers": 0.4,
    "cpu_s_per_gb_write_128k_workers": 0.8,
}


def test_the_lowest_limit_binds_and_what_was_not_measured_is_left_out() -> None:
    costs = Costs.of(FIGURES, "write", "128k", "_workers")
    assert costs.limits_gb_s() == {
        "drives": 28.0,
        "memory": 75.0,
        "loop": pytest.approx(80_000 * 131_072 / 1e9),
        "daemon": pytest.approx(5.0),
        "workers": pytest.approx(10.0),
        "cores": pytest.approx(80.0),
    }
    assert binding(costs.limits_gb_s()) == ("daemon", pytest.approx(5.0))
    assert Costs.of(FIGURES, "write", "512k", "_workers").limits_gb_s() == {"drives": 28.0, "memory": 75.0}
    assert not Costs.of(FIGURES, "write", "128k", "").measured
    assert "| 128k | write | 12.5 | 0.2 | 0.4 | 0.8 |" in tables(FIGURES, "_workers")
