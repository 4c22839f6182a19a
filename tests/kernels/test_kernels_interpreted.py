"""All cases that run in Triton's interpreter, in one process: TRITON_INTERPRET must be set before it decorates."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

pytestmark = [pytest.mark.kernels, pytest.mark.engine]
TESTS = Path(__file__).resolve().parent.parent
FILES = {
    "kernels/interpreted_kernels.py": (37, 23),
    "copies/interpreted_copier.py": (21, 19),
    "engine/interpreted_engine.py": (4, 6),
}
"""How many tests each file has, in the first ring and in `stress`."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ring", ["not stress", pytest.param("stress", marks=pytest.mark.stress)])
def test_every_case_in_the_interpreter(ring: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    files = [str(TESTS / name) for name in FILES]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", ring, *files]
    ran = subprocess.run(
        command, env=environment, cwd=TESTS.parent, capture_output=True, text=True, timeout=1100, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for name, counts in FILES.items():
        found = len(re.findall(rf"^tests/{re.escape(name)}::.* PASSED", ran.stdout, re.MULTILINE))
        assert found == counts[ring == "stress"], f"{found} tests of {name}"
