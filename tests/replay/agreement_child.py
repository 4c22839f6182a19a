"""A daemon whose clock goes on when a test says so: `agreement_child.py CLOCK-FILE [daemon's flags]`.

The file holds seconds as a double. All that decides which block goes when reads this clock; the deadlines of sockets
and disks do not.
"""

from __future__ import annotations

import math
import mmap
import struct
import sys
from types import SimpleNamespace

from tiercache.daemon.__main__ import main
from tiercache.daemon.ground import clock

if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        seconds = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    clock.time = SimpleNamespace(monotonic=lambda: struct.unpack("d", seconds[:8])[0])  # type: ignore[assignment]
    clock.STALL_S = math.inf  # steps are not stalls
    sys.exit(main(sys.argv[2:]))
