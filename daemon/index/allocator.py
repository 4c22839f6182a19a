"""Arena allocator: regions, each split in frames of one size class, and the owners of the frames.

A frame's number is `region_id << 48 | byte offset`, as on the wire. Size classes come from the namespaces. A region
belongs to one class as long as one of its frames is in use, and can be split again when all are free. `holders` are
apart from owners: a frame given back while something outside (a ZeroMQ send, a write to a disk) still reads it becomes
free only when that has ended.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, takewhile

from tiercache.protocol.messages import OFFSET_MASK, REGION_SHIFT

NO_FRAME = -1
NO_ACCOUNT = 0
MOVED = -1
"""In `RegionFrames.seen`: the frame was taken or given back."""
_OTHER = bytes((1, 0)) + bytes(254)


class RegionFrames:
    """One region's frames: those from `fresh` on were never used, those given back are on the stack `returned`.

    `counts` are its frames by account, and `taken` is what `Allocator.taken_bytes` has last counted for each of these.
    `accounts` is the account of each frame, kept once the first frame has one. `seen` is what a `FrameCheck` notes of
    each, while there is one.
    """

    __slots__ = (
        "accounts",
        "counts",
        "emptying",
        "entries",
        "frames",
        "fresh",
        "owned",
        "region_id",
        "returned",
        "seen",
        "size_bytes",
        "taken",
    )

    def __init__(self, region_id: int, size_bytes: int) -> None:
        self.region_id = region_id
        self.size_bytes = size_bytes
        self.taken: dict[int, int] = {}
        self.split(size_bytes)

    def split(self, frame_bytes: int) -> None:
        self.frames = self.size_bytes // frame_bytes
        self.fresh = 0
        self.returned = array("I")
        self.owned = 0
        self.emptying = False
        self.entries = array("i", bytes(4 * self.frames))  # index entry + 1 of each frame, 0 without one
        self.accounts: array[int] | None = None
        self.counts: dict[int, int] = {}
        self.seen: array[int] | None = None


class SizeClass:
    """All regions with frames of one size."""

    def __init__(self, frame_bytes: int) -> None:
        self.frame_bytes = frame_bytes
        self.regions: dict[int, RegionFrames] = {}
        self.open: list[RegionFrames] = []  # regions with a free frame; the last is used first
        self.free = 0
        self.frames = 0
        """Frames of all regions, in use or not. Counted as they come and go: there may be thousands of regions."""

    def add(self, region: RegionFrames) -> None:
        """One more region, which is split already."""
        self.regions[region.region_id] = region
        self.frames += region.frames

    def remove(self, region: RegionFrames) -> None:
        """A region leaves, before it is split again."""
        del self.regions[region.region_id]
        self.frames -= region.frames


class Allocator:
    """Frames of the arena. Event loop only; O(1) except for splitting a region again.

    A frame counts for its account from `take` until it is free, whatever becomes of its block meanwhile: being written,
    evicted while something still reads it, dropped but not yet unlinked. Account 0 means no account and is not counted.
    """

    def __init__(self) -> None:
        self.classes: dict[int, SizeClass] = {}
        self.unassigned: list[RegionFrames] = []
        self.arena_bytes = 0
        self.used_bytes = 0
        self.account_bytes: Counter[int] = Counter()
        self._holders: dict[int, int] = {}
        self.waiting: set[int] = set()
        """Frames that were given back and become free when the last holder is done."""
        self._class_of: dict[int, SizeClass] = {}
        self._taken: Counter[int] = Counter()
        self._moved: set[RegionFrames] = set()  # regions of which frames came or went since that was counted

    def add_region(self, region_id: int, size_bytes: int) -> None:
        """Add a region that all mapping clients have been told of."""
        self.unassigned.append(RegionFrames(region_id, size_bytes))
        self.arena_bytes += size_bytes

    def adopt_region(self, region_id: int, size_bytes: int, frame_bytes: int, owned: bytearray) -> None:
        """Add a region that was in use in an earlier life: frames with a 1 in `owned` have owners, the others 0."""
        size_class = self.size_class(frame_bytes)
        region = RegionFrames(region_id, size_bytes)
        region.split(frame_bytes)
        region.fresh = region.frames
        free = owned[::-1].translate(_OTHER)
        region.returned = array("I", compress(range(region.frames - 1, -1, -1), free))
        region.owned = region.frames - len(region.returned)
        size_class.add(region)
        size_class.free += len(region.returned)
        if region.returned:
            size_class.open.insert(0, region)
        self._class_of[region_id] = size_class
        self.arena_bytes += size_bytes
        self.used_bytes += region.owned * frame_bytes

    def size_class(self, frame_bytes: int) -> SizeClass:
        """The class of that frame size, created at first use."""
        if frame_bytes not in self.classes:
            self.classes[frame_bytes] = SizeClass(frame_bytes)
        return self.classes[frame_bytes]

    def take(self, size_class: SizeClass, account: int = NO_ACCOUNT) -> int:
        """Take a free frame; returns it, or NO_FRAME. Frames taken one after another tend to be neighbours."""
        if not size_class.open and not self._open_region(size_class):
            return NO_FRAME
        region = size_class.open[-1]
        if region.returned:
            number = region.returned.pop()
        else:
            number = region.fresh
            region.fresh += 1
        if region.seen is not None:
            region.seen[number] = MOVED
        region.owned += 1
        self._moved.add(region)
        size_class.free -= 1
        self.used_bytes += size_class.frame_bytes
        if region.owned == region.frames:
            size_class.open.pop()
        if account:
            if region.accounts is None:
                region.accounts = array("I", bytes(4 * region.frames))
            region.accounts[number] = account
            region.counts[account] = region.counts.get(account, 0) + 1
            self.account_bytes[account] += size_class.frame_bytes
        return region.region_id << REGION_SHIFT | number * size_class.frame_bytes

    def take_many(self, size_class: SizeClass, count: int, account: int = NO_ACCOUNT) -> list[int]:
        """As many calls of `take`, until one fails; those of a region in ascending order."""
        if account:
            frames = (self.take(size_class, account) for _ in range(count))
            return list(takewhile(NO_FRAME.__ne__, frames))
        taken = list[int]()
        while len(taken) < count and (size_class.open or self._open_region(size_class)):
            region, frame_bytes = size_class.open[-1], size_class.frame_bytes
            most = min(count - len(taken), region.frames - region.owned)
            again = min(most, len(region.returned))
            numbers = sorted(region.returned[len(region.returned) - again :])
            del region.returned[len(region.returned) - again :]
            numbers += range(region.fresh, region.fresh + most - again)
            region.fresh += most - again
            if region.seen is not None:
                for number in numbers:
                    region.seen[number] = MOVED
            region.owned += most
            self._moved.add(region)
            size_class.free -= most
            self.used_bytes += most * frame_bytes
            if region.owned == region.frames:
                size_class.open.pop()
            first = region.region_id << REGION_SHIFT
            taken += [first | number * frame_bytes for number in numbers]
        return taken

    def give_back(self, frame: int) -> None:
        """The owner is done with the frame. It is free at once, or when its last holder is done."""
        region_id = frame >> REGION_SHIFT
        size_class = self._class_of[region_id]
        region = size_class.regions[region_id]
        number = (frame & OFFSET_MASK) // size_class.frame_bytes
        if region.seen is not None:
            region.seen[number] = MOVED
        region.entries[number] = 0  # the entry may be another block's before the last holder is done
        account = region.accounts[number] if region.accounts is not None else NO_ACCOUNT
        if frame in self._holders:
            self.waiting.add(frame)
            return
        if account:
            self._leave_account(region, number, account, size_class.frame_bytes)
        region.returned.append(number)
        region.owned -= 1
        self._moved.add(region)
        self.used_bytes -= size_class.frame_bytes
        if region.emptying:
            self._finish_emptying(size_class, region)
            return
        if region.owned == region.frames - 1:
            size_class.open.insert(0, region)
        size_class.free += 1

    def hold(self, frame: int) -> None:
        """Something that cannot be recalled starts to read or write the frame."""
        self._holders[frame] = self._holders.get(frame, 0) + 1

    def hold_many(self, frames: Sequence[int]) -> None:
        """`hold` each of them."""
        holders, once = self._holders, dict.fromkeys(frames, 1)
        if len(once) == len(frames) and holders.keys().isdisjoint(once):
            holders.update(once)  # nearly always
            return
        for frame in frames:
            holders[frame] = holders.get(frame, 0) + 1

    def unhold(self, frame: int) -> None:
        """End one `hold`."""
        self._holders[frame] -= 1
        if self._holders[frame] == 0:
            del self._holders[frame]
            if frame in self.waiting:
                self.waiting.remove(frame)
                self.give_back(frame)

    def unhold_many(self, frames: Iterable[int]) -> None:
        """`unhold` each of them."""
        holders, waiting = self._holders, self.waiting
        for frame in frames:
            if holders[frame] == 1 and frame not in waiting:
                del holders[frame]
            else:
                self.unhold(frame)

    def _leave_account(self, region: RegionFrames, number: int, account: int, frame_bytes: int) -> None:
        assert region.accounts is not None
        region.accounts[number] = NO_ACCOUNT
        region.counts[account] -= 1
        if not region.counts[account]:
            del region.counts[account]
        self.account_bytes[account] -= frame_bytes

    def account_of(self, frame: int) -> int:
        """The account of a frame in use."""
        size_class = self._class_of[frame >> REGION_SHIFT]
        accounts = size_class.regions[frame >> REGION_SHIFT].accounts
        return NO_ACCOUNT if accounts is None else accounts[(frame & OFFSET_MASK) // size_class.frame_bytes]

    def taken_bytes(self) -> Counter[int]:
        """Of each account its share of all regions in use. Callers must not change it.

        A step for each account in each region of which frames came or went since the last call: there may be a thousand
        regions, with a hundred accounts each.
        """
        taken = self._taken
        for region in self._moved:
            taken.subtract(region.taken)
            region.taken = {
                account: region.size_bytes * count // region.owned for account, count in region.counts.items()
            }
            taken.update(region.taken)
        self._moved.clear()
        return taken

    def shares(self) -> Iterator[tuple[int, int, int, dict[int, int]]]:
        """Each region in use: its id, its bytes, its frames in use, and how many of these each account has."""
        for region_id, size_class in self._class_of.items():
            region = size_class.regions[region_id]
            yield region_id, region.size_bytes, region.owned, region.counts

    def set_entries(self, frames: Sequence[int], entries: Sequence[int]) -> None:
        """Record which index entry each frame belongs to, so that a region can be emptied."""
        region_id = -1
        for frame, entry in zip(frames, entries, strict=True):
            if frame >> REGION_SHIFT != region_id:
                region_id = frame >> REGION_SHIFT
                size_class = self._class_of[region_id]
                column, frame_bytes = size_class.regions[region_id].entries, size_class.frame_bytes
            column[(frame & OFFSET_MASK) // frame_bytes] = entry + 1

    def entries_of(self, region_id: int, emptying: bool) -> array[int] | None:
        """For each frame of a region its index entry + 1, 0 where it has none. Not a copy.

        None when the region is not in use, and unless its being emptied is as `emptying` says.
        """
        size_class = self._class_of.get(region_id)
        region = size_class.regions[region_id] if size_class is not None else None
        return region.entries if region is not None and region.emptying is emptying else None

    def regions_like(self, region_id: int) -> list[int]:
        """Ids of all regions of the same class."""
        return sorted(self._class_of[region_id].regions)

    def bytes_in_use(self, region_id: int) -> int:
        """Bytes of a region's frames in use."""
        return self.owned_frames(region_id) * self._class_of[region_id].frame_bytes

    def owned_frames(self, region_id: int) -> int:
        """Frames of a region in use, with or without an index entry."""
        return self._class_of[region_id].regions[region_id].owned

    def empty_region(self, region_id: int) -> None:
        """Hand out no more frames of the region; it is unassigned once the last one is back."""
        size_class = self._class_of[region_id]
        region = size_class.regions[region_id]
        region.emptying = True
        if region in size_class.open:
            size_class.open.remove(region)
        size_class.free -= region.frames - region.owned
        self._finish_emptying(size_class, region)

    def _finish_emptying(self, size_class: SizeClass, region: RegionFrames) -> None:
        if region.owned == 0:
            size_class.remove(region)
            del self._class_of[region.region_id]
            region.split(region.size_bytes)
            self.unassigned.append(region)

    def frame_bytes(self, frame: int) -> int:
        """Size of a frame in use."""
        return self._class_of[frame >> REGION_SHIFT].frame_bytes

    def _open_region(self, size_class: SizeClass) -> bool:
        """Give the class one more region: an unassigned one, or an empty one of another class."""
        region = self._take_unassigned(size_class.frame_bytes) or self._take_empty(size_class)
        if region is None:
            return False
        region.split(size_class.frame_bytes)
        size_class.add(region)
        size_class.open.append(region)
        size_class.free += region.frames
        self._class_of[region.region_id] = size_class
        return True

    def _take_unassigned(self, frame_bytes: int) -> RegionFrames | None:
        for place, region in enumerate(self.unassigned):
            if region.size_bytes >= frame_bytes:
                return self.unassigned.pop(place)
        return None

    def _take_empty(self, size_class: SizeClass) -> RegionFrames | None:
        for other in self.classes.values():
            if other is size_class or other.free == 0:
                continue
            for region in other.open:
                if region.owned == 0 and region.size_bytes >= size_class.frame_bytes:
                    other.open.remove(region)
                    other.remove(region)
                    other.free -= region.frames
                    return region
        return None

    def region_of(self, region_id: int) -> tuple[SizeClass, RegionFrames] | None:
        """A region in use, and its size class."""
        size_class = self._class_of.get(region_id)
        return None if size_class is None else (size_class, size_class.regions[region_id])
