"""Segment files: their names, and a check that open ones are still intact."""

from __future__ import annotations

import contextlib
import os
import re
from bisect import bisect_right
from collections.abc import Mapping

MAX_SEGMENT_ID = 32767
"""Slots are `segment_id << 48 | offset` and must fit a signed 64-bit integer."""
_NAME = re.compile(r"([0-9]{8})\.seg")
_LOOKED_AT_ONCE = 64


def segment_name(segment_id: int) -> str:
    """The name of a segment's file."""
    return f"{segment_id:08d}.seg"


def segment_id(name: str) -> int | None:
    """The id in the name of a segment's file; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match is not None and 1 <= int(match[1]) <= MAX_SEGMENT_ID else None


class SegmentLook:
    """Checks segment files in turns. `fds`: the open ones; other code changes it meanwhile."""

    def __init__(self, fds: Mapping[int, int]) -> None:
        self._fds = fds
        self._last = 0

    def problem(self, segment_bytes: int) -> str:
        """What became of one of the next segments' files; empty when they are in order. Blocks for some microseconds.

        A file that was deleted can still be written to and read; its blocks are lost with the daemon, and its room
        is not free until then.
        """
        numbers = sorted(self._fds)
        first = bisect_right(numbers, self._last)
        for number in (numbers[first:] + numbers[:first])[:_LOOKED_AT_ONCE]:
            self._last = number
            with contextlib.suppress(KeyError, OSError):  # removed by ourselves
                fd = self._fds[number]
                found = os.fstat(fd)
                whole = found.st_nlink > 0 and found.st_size == segment_bytes
                if not whole and self._fds[number] == fd:  # else it was another file's descriptor by then
                    what = "truncated" if found.st_nlink else "deleted"
                    return f"segments/{segment_name(number)} was {what} while the daemon used it"
        return ""
