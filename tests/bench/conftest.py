"""The policies of `bench/`, and what the tests of the daemon's own policies have for all of them, can be imported."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(_ROOT / folder) for folder in ("bench", "tests/daemon/policies", "tests/replay")]
