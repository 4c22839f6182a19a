"""vLLM's own server, in as many processes as it likes, stopped and started again over one daemon."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_engines import prompt, wait_until
from vllm_servers import complete, metric, server

import tiercache

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


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
