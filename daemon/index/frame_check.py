"""Checks in slices, while frames come and go, that each frame in use has exactly one owner.

From `begin` on the allocator records in each region which frames it hands out and takes back. A frame without a record
has not changed: it was free and has no owner, or it was in use and the check meets its owner, because owners follow
each other in one order only:

    being written ─► in the index ─► leaving (of a disk: until its row is deleted) ─► free
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Container, Iterable, Sequence

from tiercache.daemon.ground.slices import LOOKUPS, Steps
from tiercache.protocol.messages import OFFSET_MASK, REGION_SHIFT

from .allocator import Allocator, RegionFrames, SizeClass
from .index import Index

UNSEEN, FREE, WRITTEN = 0, -2, -3
"""States of a frame, beside the allocator's `MOVED`; entry + 1 for a frame met in the index."""
_AT_ONCE = 8 * LOOKUPS
"""Notes that are counted together, not looked at one by one."""


class FrameCheck:
    """One check of all frames of an allocator. Event loop only; always `stop` it."""

    def __init__(self, allocator: Allocator) -> None:
        self.findings: list[str] = []
        self._allocator = allocator
        self._regions: list[tuple[SizeClass, RegionFrames]] = []
        self._met_again: set[int] = set()  # frames met with a second owner
        self._owners: dict[int, object] = {}  # who writes those frames now

    def begin(self) -> Steps[None]:
        """Start recording frames that come and go, and note which are free now."""
        for size_class in list(self._allocator.classes.values()):
            for region in list(size_class.regions.values()):
                seen = region.seen = array("i", bytes(4 * region.frames))
                self._regions.append((size_class, region))
                seen[region.fresh :] = array("i", [FREE]) * (region.frames - region.fresh)
                returned = region.returned[:]
                for first in range(0, len(returned), LOOKUPS):
                    for number in returned[first : first + LOOKUPS]:
                        if seen[number] == UNSEEN:
                            seen[number] = FREE
                    yield
                yield

    def stop(self) -> None:
        """Stop recording."""
        for _, region in self._regions:
            region.seen = None

    def _place(self, frame: int) -> tuple[array[int] | None, int]:
        """Where a frame's note is; None for a frame in a region that was made meanwhile."""
        found = self._allocator.region_of(frame >> REGION_SHIFT)
        if found is None:
            self.findings.append(f"a frame of region {frame >> REGION_SHIFT} has an owner, but that is not in use")
            return None, 0
        size_class, region = found
        return region.seen, (frame & OFFSET_MASK) // size_class.frame_bytes

    def written(self, frames: Iterable[int]) -> None:
        """These frames are being written: to be told of all of them before the first entry of the index."""
        for frame in frames:
            seen, number = self._place(frame)
            if seen is None:
                continue
            if seen[number] == FREE:
                self.findings.append(_free_and_owned(frame, number))
            elif seen[number] == WRITTEN:
                self._met_again.add(frame)
            seen[number] = WRITTEN

    def entry(self, index: Index, entry: int, frame: int) -> None:
        """An entry of the index has this frame now."""
        seen, number = self._place(frame)
        if seen is None:
            return
        before = seen[number]
        if before == FREE:
            self.findings.append(_free_and_owned(frame, number))
        elif before == WRITTEN:
            self._met_again.add(frame)
        elif before > 0 and index.frame[before - 1] == frame:  # else the allocator has noted that it moved
            self.findings.append(f"entries {before - 1} and {entry} have the same frame: it has two owners")
        seen[number] = entry + 1

    def written_again(self, index: Index, owners: Sequence[tuple[int, object]]) -> None:
        """Present writers of frames that seemed to have two owners. `owners` are a part of all."""
        for frame, owner in owners:
            if frame not in self._met_again:
                continue
            other = self._owners.setdefault(frame, owner)
            seen, number = self._place(frame)
            entry = -1 if seen is None else seen[number] - 1
            in_index = entry >= 0 and index.state[entry] and index.frame[entry] == frame
            if other != owner or in_index:
                self.findings.append(f"region {frame >> REGION_SHIFT} frame {number} has two owners")

    @property
    def in_doubt(self) -> bool:
        """True if `written_again` must be called."""
        return bool(self._met_again)

    def end(self, leaving: Container[int]) -> Steps[None]:
        """All owners have been met except those that are `leaving`."""
        waiting = self._allocator.waiting
        for size_class, region in self._regions:
            for first in range(0, region.frames, _AT_ONCE):
                if region.seen is None:
                    break  # the region was emptied and is split again
                notes, lost = region.seen[first : first + _AT_ONCE], 0
                for number in range(first, first + len(notes)) if notes.count(UNSEEN) else ():
                    frame = region.region_id << REGION_SHIFT | number * size_class.frame_bytes
                    lost += notes[number - first] == UNSEEN and frame not in waiting and frame not in leaving
                if lost:
                    self.findings.append(f"region {region.region_id} counts {lost} frames in use that have no owner")
                yield
        yield from self._check_counts()

    def _check_counts(self) -> Steps[None]:
        """Check the sums: of each region by itself, then of all at one moment."""
        findings, allocator = self.findings, self._allocator
        for _, region in self._regions:
            if region.seen is not None and region.accounts is not None:
                counts = Counter(account for account in region.accounts if account)
                if counts != region.counts:
                    text = f"counts {region.counts} frames by account, has {dict(counts)}"
                    findings.append(f"region {region.region_id} {text}")
                yield
        used_bytes, total = 0, Counter[int]()
        for size_class in allocator.classes.values():
            free = frames = 0
            for region in size_class.regions.values():
                frames += region.frames
                free += 0 if region.emptying else region.frames - region.owned
                used_bytes += region.owned * size_class.frame_bytes
                for account, count in region.counts.items():
                    total[account] += count * size_class.frame_bytes
                if region.fresh - len(region.returned) != region.owned:
                    findings.append(f"region {region.region_id}: free list and count differ")
            if (free, frames) != (size_class.free, size_class.frames):
                counted = f"{size_class.free} of {size_class.frames} frames free"
                findings.append(f"class {size_class.frame_bytes} counts {counted}, has {free} of {frames}")
        if used_bytes != allocator.used_bytes:
            findings.append(f"{allocator.used_bytes} bytes counted in use, {used_bytes} are")
        if total != +allocator.account_bytes:
            findings.append("bytes by account are not counted as they are")


def _free_and_owned(frame: int, number: int) -> str:
    return f"region {frame >> REGION_SHIFT} frame {number} is free and owned"
