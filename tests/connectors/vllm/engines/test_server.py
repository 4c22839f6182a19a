"""vLLM's own server, in as many processes as it likes, stopped and started again over one daemon."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import BLOCK, ENGINE, PATIENCE_S, prompt, transfer_config, wait_until

import tiercache

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@contextmanager
def server(model: str, address: str, log: Path) -> Iterator[str]:
    """An OpenAI server with the connector; yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "max-model-len": 2048,
        "block-size": BLOCK,
        "max-num-batched-tokens": 512,
        "kv-cache-memory-bytes": ENGINE["kv_cache_memory_bytes"],
        "kv-transfer-config": json.dumps(transfer_config(address)),
        "served-model-name": "tiny",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **ENVIRONMENT})
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            return bool(urllib.request.urlopen(f"{url}/health", timeout=60).status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    try:
        wait_until(answers, timeout_s=300)
        yield url
        process.terminate()
        assert process.wait(PATIENCE_S) in (0, -15)
    finally:
        process.kill()
        process.wait()


def complete(url: str, ids: list[int], tokens: int) -> dict[str, Any]:
    """The answer to a completion request."""
    body = {"model": "tiny", "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


def metric(url: str, name: str, *words: str) -> float:
    """The sum of a counter's series whose labels have all `words`."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    found = [line for line in lines if line.startswith(name) and all(word in line for word in words)]
    return sum(float(line.split()[-1]) for line in found)


def moved(url: str, name: str) -> float:
    """The connector's counters; vLLM passes them on with later steps."""
    complete(url, [5, 6, 7], 4)
    return metric(url, f"vllm:tiercache_{name}_total")


def test_a_server_finds_what_the_one_before_computed(
    model: str, daemon: tiercache.LaunchedDaemon, tmp_path: Path
) -> None:
    ids = prompt(1000, "server")
    with server(model, daemon.address, tmp_path / "first") as url:
        first = complete(url, ids, 16)
        wait_until(lambda: moved(url, "stored_blocks") >= 31)
    with server(model, daemon.address, tmp_path / "second") as url:
        second = complete(url, ids, 16)
        assert second["choices"][0]["text"] == first["choices"][0]["text"]
        assert metric(url, "vllm:external_prefix_cache_hits_total") == 992
        assert metric(url, "vllm:prompt_tokens_cached_by_source_total", 'source="host"') == 992
        wait_until(lambda: moved(url, "loaded_blocks") == 31)
    lines = (tmp_path / "second").read_text().splitlines()  # as vLLM logs by default
    (connected,) = [line for line in lines if "connected to the cache at" in line]
    assert f"connected to the cache at {daemon.address} (daemon {tiercache.__version__}, pid {daemon.pid})" in connected
    (served,) = [line for line in lines if "prompt tokens from the cache" in line]
    assert "992 of 1,000 prompt tokens from the cache (DRAM 992, NVMe 0) in" in served
    assert "INFO" in served
