"""Fixtures that more than one test file needs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_settings_from_outside() -> Iterator[None]:
    """Tests see none of the caller's TIERCACHE_* settings, and neither do the processes they start."""
    outside = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("TIERCACHE_")}
    yield
    os.environ.update(outside)
