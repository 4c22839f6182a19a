"""Tests here run the cases of tests/kernels on a real device, and need one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_FOLDERS = ("kernels", "gds", "daemon/tiers/nvme", "daemon/tiers", "daemon")
sys.path[:0] = [str(Path(__file__).parent.parent / folder) for folder in _FOLDERS]


@pytest.fixture(scope="session")
def device() -> str:
    """The device under test; skips where there is none."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda:0"
