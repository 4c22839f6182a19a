"""Tests here run the cases of tests/kernels on a real device, and need one."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def device() -> str:
    """The device under test; skips where there is none."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda:0"
