"""The daemon, its disks and the chains are those of the NVMe tier's tests."""

from __future__ import annotations

import sys
from pathlib import Path

_DAEMON = Path(__file__).parent.parent / "daemon"
sys.path[:0] = [str(_DAEMON / "tiers" / "nvme"), str(_DAEMON / "tiers"), str(_DAEMON)]
