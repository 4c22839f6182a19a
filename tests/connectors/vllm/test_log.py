"""What vLLM's log says of the cache, without vLLM."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from tiercache.connectors.vllm import compat
from tiercache.connectors.vllm import log as vllm_log
from tiercache.connectors.vllm.costs import TierBlocks
from tiercache.connectors.vllm.log import LINE_EVERY_S, MOST_LINES, RequestLog

LOGGER = "tiercache.connectors.vllm"


@pytest.mark.parametrize("configured", ["nothing", "level", "handler", "not vLLM's"])
def test_lines_go_where_vllms_go_unless_logging_was_configured(
    configured: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs, handler = logging.Logger("tiercache"), logging.Logger("vllm", logging.WARNING), logging.NullHandler()
    ours.setLevel(logging.INFO if configured == "level" else logging.NOTSET)
    ours.handlers = [logging.NullHandler()] if configured == "handler" else []
    theirs.handlers, theirs.propagate = [] if configured == "not vLLM's" else [handler], False
    before = list(ours.handlers), ours.level, True
    loggers = SimpleNamespace(getLogger={"tiercache": ours, "vllm": theirs}.__getitem__, NOTSET=logging.NOTSET)
    monkeypatch.setattr(compat, "logging", loggers)
    compat.join_vllm()
    joined = [handler], logging.WARNING, False
    assert (ours.handlers, ours.level, ours.propagate) == (joined if configured == "nothing" else before)


def served(log: RequestLog, number: int) -> None:
    log.served(f"r{number}", TierBlocks(1024, 512), 1601, 64, 0.0123)


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
