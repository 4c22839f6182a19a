"""`tiercache demo --engine vllm`, all of it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

COMMAND = [sys.executable, "-m", "tiercache.cli.main", "demo", "--engine", "vllm", "--json", "--tokens", "600"]


def test_every_run_has_the_same_tokens_and_finds_them_where_it_says() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["tokens_identical"] is True
    assert figures["hit_tokens"] == figures["nvme_hit_tokens"] == figures["back_hit_tokens"] == 576
    assert "Traceback" not in done.stderr
