"""What the probe decides for each behaviour of kvikio. kvikio and torch are stand-ins over host memory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiercache.connector.direct import probe as gds_probe
from tiercache.connector.direct.probe import GdsProbe, Mode, probe_gds

FAKES = Path(__file__).parent / "fakes"
Probe = Callable[..., GdsProbe]


@pytest.fixture(autouse=True)
def nothing_is_known_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gds_probe, "_probes", {})


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Probe:
    """Probes a directory on a machine that has a driver and a kvikio of the given behaviour."""

    def run(behaviour: str, timeout_s: float = 30.0) -> GdsProbe:
        monkeypatch.setattr(gds_probe, "driver", object)
        monkeypatch.syspath_prepend(str(FAKES))
        monkeypatch.setenv("PYTHONPATH", str(FAKES))
        monkeypatch.setenv("FAKE_KVIKIO", behaviour)
        found = probe_gds(tmp_path, timeout_s)
        assert list(tmp_path.iterdir()) == [], "nothing is left behind"
        return found

    return run


def test_gds_where_it_works(probe: Probe) -> None:
    found = probe("gds=ok,compat=fail")
    assert (found.mode, found.reason, found.write_reason) == (Mode.GDS, "", "")
    assert min(found.direct_bytes_per_s, found.bounce_bytes_per_s, found.host_bytes_per_s) > 0
    assert min(found.direct_write_bytes_per_s, found.bounce_write_bytes_per_s) > 0


@pytest.mark.stress
@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [("fail", "driver not open"), ("lie", "what cuFile wrote are not the bytes"), ("short", "came back short")],
)
def test_reads_are_used_where_writes_do_not_work(probe: Probe, behaviour: str, reason: str) -> None:
    found = probe(f"gds=ok,compat=fail,write={behaviour}")
    assert (found.mode, found.reason) == (Mode.GDS, "")
    assert reason in found.write_reason
    assert reason in found.why_not_store
    assert found.direct_bytes_per_s > 0
    assert (found.direct_write_bytes_per_s, found.bounce_write_bytes_per_s) == (0, 0)
    assert not found.use_direct_store


@pytest.mark.stress
@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("fail", "driver not open"),
        ("lie", "not the bytes of the file"),
        ("short", "came back short"),
        ("die", "ended with status -6"),
    ],
)
def test_cufile_compat_where_gds_does_not(probe: Probe, behaviour: str, reason: str) -> None:
    found = probe(f"gds={behaviour},compat=ok")
    assert found.mode is Mode.COMPAT
    assert found.reason.startswith("gds: ")
    assert reason in found.reason
    assert found.direct_bytes_per_s > 0


@pytest.mark.stress
def test_what_hangs_for_ever_is_killed(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    run_stage = gds_probe._run_stage

    def hurry_where_it_hangs(directory: str, mode: Mode, timeout_s: float) -> dict[str, Any]:
        return run_stage(directory, mode, 2.0 if mode is Mode.GDS else timeout_s)

    monkeypatch.setattr(gds_probe, "_run_stage", hurry_where_it_hangs)
    found = probe("gds=hang,compat=ok")
    assert found.mode is Mode.COMPAT
    assert "hung and was killed after 2 s" in found.reason
    command = ["ps", "--ppid", str(os.getpid()), "-o", "args"]
    assert "probe_stage" not in subprocess.run(command, capture_output=True, text=True, check=False).stdout
