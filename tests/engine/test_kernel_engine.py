"""The engine over the Triton kernels without a GPU: see `interpreted_engine.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.kernels]
HERE = Path(__file__).parent


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("marks", "count"), [("not slow", 13), pytest.param("slow", 6, marks=pytest.mark.stress)])
def test_the_engine_in_the_interpreter(marks: str, count: int) -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks]
    command += [str(HERE / "interpreted_engine.py")]
    ran = subprocess.run(
        command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, timeout=580, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None
    assert int(passed[1]) == count, ran.stdout
