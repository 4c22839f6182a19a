"""Fixtures that more than one test file needs."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

import tiercache

with contextlib.suppress(ImportError):  # not in every environment that runs tests
    from hypothesis import settings

    # By default an example that takes more than 200 ms fails, which is what a busy machine does.
    settings.register_profile("tiercache", deadline=None)
    settings.load_profile("tiercache")

PATIENCE_S = 10.0
"""Deadline of a client's request where a test sets none.

Half a second, the default, is what an engine waits before it computes; on a busy machine a good daemon takes longer.
"""

for connecting in (tiercache.connect, tiercache.Client.__init__, tiercache.Client.connect.__func__):  # type: ignore[attr-defined]
    connecting.__kwdefaults__["request_timeout_s"] = PATIENCE_S


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a caller whose own time is limited have the tests skipped that no time is left for."""
    parser.addoption(
        "--begin-by", type=float, metavar="SECONDS", help="skip tests that would begin later than this Unix time"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that comes after `--begin-by`, before any of its fixtures is made."""
    begin_by: float | None = item.config.getoption("--begin-by", None)
    if begin_by is not None and time.time() > begin_by:
        pytest.skip(f"no time was left for tests of {item.path.name} (--begin-by)")


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, as in any program: processes that run tests side by side ignore it."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, earlier)


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The process cannot start another thread until this is undone."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    return monkeypatch


@pytest.fixture(autouse=True)
def no_settings_from_outside() -> Iterator[None]:
    """Tests see none of the caller's TIERCACHE_* settings, and neither do the processes they start."""
    outside = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("TIERCACHE_")}
    yield
    os.environ.update(outside)
