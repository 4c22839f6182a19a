"""vLLM on this GPU, where it is installed: the connector's own tests on it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence

from gpu.place import ROOT
from gpu.tell import check, fact, left_s, skip

FILES = ("tests/connectors/vllm/engines/test_connector.py", "tests/connectors/vllm/test_worker.py")


def run(_: Sequence[str]) -> None:
    """One line, or the tests."""
    if importlib.util.find_spec("vllm") is None:
        skip("vLLM", "it is not installed here")
        return
    import torch

    if not torch.cuda.is_available():
        skip("vLLM", "there is no CUDA device")
        return
    from importlib.metadata import version

    fact("vllm", version("vllm"))
    options = ["-q", "-x", "-o", "addopts=", "-o", "filterwarnings=", "-o", "timeout=", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *FILES]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=max(left_s() - 5, 1), check=False
        )
    except subprocess.TimeoutExpired:
        check("the connector's tests on vLLM", False, "not done in time")
        return
    lines = done.stdout.strip().splitlines()
    check("the connector's tests on vLLM", done.returncode == 0, "\n".join(lines[-8:]))
