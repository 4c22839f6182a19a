"""Makes the policies of `bench/` importable, and the rules that the tests of the daemon's policies share."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(_ROOT / folder) for folder in ("bench", "tests/daemon/policies", "tests/replay")]
