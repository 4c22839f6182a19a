"""Fixtures that more than one test file needs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiercache

with contextlib.suppress(ImportError):  # not in every environment that runs tests
    from hypothesis import settings
    from hypothesis.internal.conjecture import providers

    # An example may take long, as on a busy machine. The examples are the same each time; machines.py has others.
    settings.register_profile("tiercache", deadline=None, derandomize=True, database=None)
    settings.load_profile("tiercache")
    # Hypothesis also draws constants of all modules that are loaded, which depend on the tests that ran before.
    providers._get_local_constants = lambda: providers._local_constants

TESTS = Path(__file__).parent
HELPERS = (path.parent for path in TESTS.rglob("*.py") if not path.name.startswith(("test_", "conftest")))
sys.path[:0] = sorted({str(folder) for folder in HELPERS if folder.name not in ("fakes", "pauses")})
"""Test files of two folders may have one name; the modules that help them are imported by theirs, from any folder.

What is in `fakes` stands in for a package, and `pauses` for a busy machine: only chosen processes see them.
"""

PATIENCE_S = 60.0
"""Deadline of a client's request where a test sets none.

Half a second, the default, is what an engine waits before it computes; on a busy machine a good daemon takes longer.
"""

for connecting in (tiercache.connect, tiercache.Client.__init__, tiercache.Client.connect.__func__):  # type: ignore[attr-defined]
    connecting.__kwdefaults__["request_timeout_s"] = PATIENCE_S


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
