"""The arena as mapped by one process, and the copies that still need it.

A copy in flight holds the mapping: `begin_copy` before the first byte, `end_copy` when the last one has arrived. After
`end` no copy begins any more, and the regions are unmapped with the last `end_copy`: unmapping an address under a
running copy kills the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tiercache.copies.arena import Region
from tiercache.copies.host_memory import process_memory
from tiercache.errors import ArenaError, DeadlineExceeded, ProtocolError
from tiercache.ground import forks
from tiercache.protocol.messages import OFFSET_MASK, REGION_SHIFT

logger = logging.getLogger("tiercache.client")
FEW = 8
"""Below this many frames, plain integers are faster than arrays."""
Addresses = npt.NDArray[np.int64]


class ArenaMapping:
    """The regions of one life of the daemon, mapped here. Thread-safe.

    Args:
        on_ready: called with `cuda`, `mlock` or `none` (how the pages are held) whenever new regions are populated; in
            a thread of its own.
        cuda: register regions with CUDA, for direct copies; otherwise, or where that fails, they are
            locked with mlock where that is allowed.
    """

    def __init__(self, on_ready: Callable[[str], None], *, cuda: bool = False) -> None:
        self._on_ready = on_ready
        self._cuda = cuda
        self._lock = threading.RLock()  # entered faster than a condition
        self._changed = threading.Condition(self._lock)
        self._regions: dict[int, Region] = {}
        self._forms: dict[int, str] = {}
        # Address and size by region id, for looking up many frames at once; 0 where none is mapped.
        self._bases = np.zeros(0, np.int64)
        self._sizes = np.zeros(0, np.int64)
        self._fresh: list[Region] = []
        self._populating = False
        self._copies = 0
        self._ended = False
        forks.watch(self, "_lock", "_changed")

    def add(self, regions: Sequence[tuple[int, int]], fds: Sequence[int]) -> None:
        """Map regions `(id, bytes)` with their descriptors, which stay the caller's.

        Raises ProtocolError when the two lists do not fit, ArenaError for a region that cannot be trusted.
        """
        if len(regions) != len(fds):
            raise ProtocolError(f"{len(regions)} regions came with {len(fds)} descriptors")
        for (region_id, size_bytes), fd in zip(regions, fds, strict=True):
            if not 0 <= region_id < 1 << (64 - REGION_SHIFT) or region_id in self._regions:
                raise ProtocolError(f"region id {region_id} is out of range or was sent twice")
            self._enter(Region(region_id, fd, size_bytes))

    def _enter(self, region: Region) -> None:
        with self._lock:
            if self._ended:
                region.unmap()
                return
            self._regions[region.region_id] = region
            highest = max(self._regions)
            bases, sizes = np.zeros(highest + 1, np.int64), np.zeros(highest + 1, np.int64)
            for known in self._regions.values():
                bases[known.region_id], sizes[known.region_id] = known.address, known.size_bytes
            # Sizes first: readers take no lock, and read both only below the length of `_bases`.
            self._sizes, self._bases = sizes, bases
            self._fresh.append(region)
            start, self._populating = not self._populating, True
            self._changed.notify_all()
        if start:
            try:
                threading.Thread(target=self._populate, name="tiercache-populate", daemon=True).start()
            except RuntimeError:  # too many threads in this process: the next region may get one
                with self._lock:
                    self._populating = False

    def addresses(self, frames: bytes | npt.NDArray[np.uint64], length: int, timeout_s: float) -> Addresses:
        """Addresses of frames, packed as u64le or as an array, for `length` bytes each: int64 `[frames]`.

        Waits up to `timeout_s` for regions whose packet is still on its way. Raises
        DeadlineExceeded, and ProtocolError for a frame that does not lie inside its region.
        """
        packed = np.frombuffer(frames, "<u8") if isinstance(frames, bytes) else frames
        if len(packed) < FEW:
            return np.array([self._address(frame, length, timeout_s) for frame in packed.tolist()], np.int64)
        ids = (packed >> np.uint64(REGION_SHIFT)).astype(np.int64)
        offsets = (packed & np.uint64(OFFSET_MASK)).astype(np.int64)
        highest = int(ids.max())
        if highest >= len(self._bases) or not self._bases[ids].all():
            self._await_regions(ids, timeout_s)
        bases, sizes = self._bases, self._sizes
        if (offsets + length > sizes[ids]).any():
            raise ProtocolError("the daemon named a frame that is not inside its region")
        result: Addresses = bases[ids] + offsets
        return result

    def _address(self, frame: int, length: int, timeout_s: float) -> int:
        region_id, offset = frame >> REGION_SHIFT, frame & OFFSET_MASK
        region = self._regions.get(region_id)
        if region is None:
            self._await_regions(np.array([region_id]), timeout_s)
            region = self._regions[region_id]
        if offset + length > region.size_bytes:
            raise ProtocolError("the daemon named a frame that is not inside its region")
        return region.address + offset

    def _await_regions(self, ids: Addresses, timeout_s: float) -> None:
        def mapped() -> bool:
            return self._ended or (int(ids.max()) < len(self._bases) and bool(self._bases[ids].all()))

        with self._lock:
            if not self._changed.wait_for(mapped, timeout_s) or self._ended:
                raise DeadlineExceeded("the region of a frame was not mapped in time")

    def begin_copy(self) -> bool:
        """Hold the mapping. False when it has ended: no copy may begin."""
        with self._lock:
            if self._ended:
                return False
            self._copies += 1
            return True

    def end_copy(self) -> None:
        """Release the mapping; every byte of the copy has arrived."""
        with self._lock:
            assert self._copies > 0
            self._copies -= 1
            last = self._ended and self._copies == 0
        if last:
            self._unmap()

    def end(self) -> None:
        """No further copies; unmap now, or with the end of the last one. Idempotent."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            last = self._copies == 0
            self._changed.notify_all()
        if last:
            self._unmap()

    def forget_in_child(self) -> None:
        """After a fork, in the child, where nothing is mapped: refuse everything, unmap nothing."""
        self._ended = True
        self._copies = 0
        self._regions = {}

    def _unmap(self) -> None:
        for region in self._regions.values():
            if not self._cuda or _unregister(region):
                region.unmap()
        self._regions = {}

    # --- populating, in a thread of its own ------------------------------------------------------

    def _populate(self) -> None:
        """Fault in and lock what was mapped, so that no copy pays for first touches."""
        while True:
            with self._lock:
                if self._ended or not self._fresh:
                    self._populating = False
                    break
                region = self._fresh.pop(0)
            if not self.begin_copy():
                continue
            try:
                start_s = time.perf_counter()
                region.populate()
                self._hold_pages(region)
                logger.debug("region %d populated in %.3f s", region.region_id, time.perf_counter() - start_s)
            finally:
                self.end_copy()
        if not self._ended:
            self._on_ready(self.registration)

    def _hold_pages(self, region: Region) -> None:
        if self._cuda:
            try:
                process_memory.register(region.address, region.size_bytes)
                self._forms[region.region_id] = "cuda"
                return
            except ArenaError as error:
                logger.warning("copies to the GPU will be slower: %s", error)
        self._forms[region.region_id] = "mlock" if region.lock() else "none"

    @property
    def registration(self) -> str:
        """The weakest way in which the pages of a region are held: `cuda`, `mlock` or `none`."""
        forms = set(self._forms.values()) or {"none"}
        return next(form for form in ("none", "mlock", "cuda") if form in forms)


def _unregister(region: Region) -> bool:
    """False if CUDA keeps some of a region: it then stays mapped, so that its addresses are not reused."""
    try:
        process_memory.unregister(region.address)
    except ArenaError as error:
        logger.warning("region %d stays mapped: %s", region.region_id, error)
        return False
    return True
