"""vLLM's own server for tests, and what they ask it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_engines import BLOCK, ENGINE, PATIENCE_S, transfer_config, wait_until

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@contextmanager
def server(model: str, address: str, log: Path, settings: Mapping[str, Any] | None = None, *more: str) -> Iterator[str]:
    """An OpenAI server with `settings` of the connector and `more` arguments; yields its URL."""
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
        "kv-transfer-config": json.dumps(transfer_config(address, **(settings or {}))),
        "served-model-name": "tiny",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *more]
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


def complete(url: str, ids: list[int], tokens: int, rank: int = 0) -> dict[str, Any]:
    """The answer to a completion request, of the engine of that rank where there are several."""
    body = {"model": "tiny", "prompt": ids, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)}
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
