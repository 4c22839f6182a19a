"""How a frame is named: its region in the top 16 bits of 64, and its offset in the region in the low 48, in bytes.

A file of its own, for processes that move blocks and speak no protocol.
"""

from __future__ import annotations

KEY_BYTES = 16
"""The name of a block in its namespace."""
REGION_SHIFT = 48
OFFSET_MASK = (1 << REGION_SHIFT) - 1
