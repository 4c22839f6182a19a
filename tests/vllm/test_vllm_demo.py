"""`tiercache demo --engine vllm`, all of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_engines import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

COMMAND = [sys.executable, "-m", "tiercache.cli.main", "demo", "--engine", "vllm", "--json", "--tokens", "600"]


def engines_of(pid: int) -> list[int]:
    """vLLM processes that a process has started."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in children if "vllm_worker" in Path(f"/proc/{child}/cmdline").read_text()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_every_run_has_the_same_tokens_and_finds_them_where_it_says() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["tokens_identical"] is True
    assert figures["hit_tokens"] == figures["nvme_hit_tokens"] == figures["back_hit_tokens"] == 576
    assert "Traceback" not in done.stderr


def test_an_interrupt_ends_vllm_too(ctrl_c: None) -> None:
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: process.poll() is not None or engines_of(process.pid), timeout_s=380)
        engines = engines_of(process.pid)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in (2, 130)  # ours, and that of newer typers
    assert "Traceback" not in said
    assert engines
    wait_until(lambda: not any(map(is_alive, engines)))
