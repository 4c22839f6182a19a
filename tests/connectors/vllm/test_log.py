"""What vLLM's log says of the cache, without vLLM."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import tiercache
from tiercache.connectors.vllm import log as vllm_log
from tiercache.connectors.vllm.costs import TierBlocks
from tiercache.connectors.vllm.log import LINE_EVERY_S, MOST_LINES, RequestLog, introduce

LOGGER = "tiercache.connectors.vllm"


def test_the_cache_is_introduced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = tiercache.NamespaceSpec(engine="t", layout="l", dtype="uint8", block_size=16, block_bytes=65536)
    (tmp_path / "disk").mkdir()
    disk = {"nvme": str(tmp_path / "disk"), "nvme_size": "64MiB", "nvme_segment": "16MiB"}
    with caplog.at_level(logging.INFO):
        absent = tiercache.connect(tmp_path / "absent", namespace=spec, warn=False)
        assert not introduce(absent, 1)
        assert not caplog.records
        with (
            tiercache.launch("16MiB", region="8MiB", **disk) as daemon,
            tiercache.connect(daemon.address, namespace=spec, required=True) as connector,
        ):
            assert introduce(connector, 2)
    (line,) = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert line.startswith(
        f"connected to the cache at {daemon.address} (daemon {tiercache.__version__}, pid {daemon.pid})"
    )
    assert "DRAM 16.0 MiB, NVME 64.0 MiB" in line
    assert line.endswith("16 tokens and 64.0 KiB of each of 2 rank(s) in a block")


def served(log: RequestLog, number: int) -> None:
    log.served(f"r{number}", TierBlocks(1024, 512), 1601, 64, 0.0123)


def test_a_request_that_was_served_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, LOGGER):
        served(RequestLog(), 1)
        RequestLog().failed({"b", "a"})
        RequestLog().missed("c", 100)
        served(RequestLog("off"), 2)
        RequestLog().served("d", TierBlocks(0, 0, 512), 600, 0, 0.0123)
    assert caplog.messages == [
        "r1: 1,536 of 1,601 prompt tokens from the cache (DRAM 1,024, NVMe 512) in 12.3 ms, 64 from vLLM's own",
        "a, b: not all came that was to come from the cache; it is computed",
        "d: 512 of 600 prompt tokens from the cache (DRAM 0, NVMe 0, the shared store 512) in 12.3 ms, "
        "0 from vLLM's own",
    ]


def test_many_requests_have_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    log, chatty = RequestLog(clock=lambda: now_s), RequestLog("all", clock=lambda: now_s)
    with caplog.at_level(logging.INFO, LOGGER):
        for number in range(MOST_LINES + 5):
            served(log, number)
        assert len(caplog.messages) == MOST_LINES
        now_s += LINE_EVERY_S
        served(log, 100)
        served(log, 101)
        assert len(caplog.messages) == MOST_LINES + 1
        assert caplog.messages[-1].endswith("vLLM's own; 5 requests before it got 7,680 tokens")
        now_s += 1000 * LINE_EVERY_S
        for number in range(200, 200 + 2 * MOST_LINES):
            served(log, number)
        assert len(caplog.messages) == 2 * MOST_LINES + 1
        caplog.clear()
        for number in range(3 * MOST_LINES):
            served(chatty, number)
        assert len(caplog.messages) == 3 * MOST_LINES
    assert vllm_log.logger.name == LOGGER
