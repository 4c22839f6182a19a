"""The daemon, its disks and the chains are those of the NVMe tier's tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "daemon" / "tiers" / "nvme"))
