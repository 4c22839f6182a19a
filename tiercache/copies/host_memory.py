"""Page-locked host memory, registered with CUDA, so that a GPU copies from and to it directly.

Registering takes about 0.1 s per GiB, during which the driver delays other calls. So regions are registered in chunks,
from a background thread, while copies go on.
"""

from __future__ import annotations

import logging
import threading
from typing import NamedTuple

import numpy as np

from tiercache.copies.copy_plan import NO_ADDRESSES, Addresses
from tiercache.copies.cuda_driver import Driver, driver
from tiercache.errors import ArenaError
from tiercache.ground import forks

log = logging.getLogger("tiercache.cuda")

PIN_CHUNK_BYTES = 64 << 20
"""Registered at a time: about 10 ms, during which the driver delays other calls."""


class Registered(NamedTuple):
    """What is registered, as a snapshot for lookups without a lock.

    Attributes:
        starts, ends: of whole regions, sorted.
        borders: where a registration begins or ends, sorted. Includes regions that are still being registered or
            unregistered: no copy may span two.
        mapped_in_place: whether kernels reach all of it at its host address.
    """

    starts: Addresses
    ends: Addresses
    borders: Addresses
    mapped_in_place: bool

    def covers(self, addresses: Addresses, length: int) -> bool:
        """True if every `addresses[i] ..< addresses[i] + length` is inside a registered region."""
        if not len(self.starts):
            return False
        region = np.searchsorted(self.starts, addresses, side="right") - 1
        return bool(((region >= 0) & (addresses + length <= self.ends[region])).all())


class _Region(NamedTuple):
    """A region in chunks; `whole` while every one of them is registered."""

    end: int
    chunks: Addresses
    whole: bool = False
    mapped_in_place: bool = True


class HostMemory:
    """The host memory that this process has registered with CUDA. Thread-safe.

    Register from a background thread while serving: frames of a region that is not registered yet are copied too, only
    more slowly.
    """

    def __init__(self, chunk_bytes: int = PIN_CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._regions: dict[int, _Region] = {}
        self.registered = Registered(NO_ADDRESSES, NO_ADDRESSES, NO_ADDRESSES, True)
        forks.watch(self, "_lock")

    def forget_in_child(self) -> None:
        """After a fork, in the child, where neither the regions nor the device can be used."""
        self._regions = {}
        self.registered = Registered(NO_ADDRESSES, NO_ADDRESSES, NO_ADDRESSES, True)

    def register(self, address: int, length: int) -> None:
        """Page-lock a region for all devices. Blocks (about 0.1 s per GiB), chunk by chunk.

        Raises ArenaError; nothing of the region is offered to copies then, and `unregister` must
        still come before its addresses are given up.
        """
        found = driver()
        if found is None:
            raise ArenaError("memory cannot be registered with CUDA: there is no driver (libcuda.so.1)")
        with self._lock:
            if length <= 0 or address in self._regions:
                raise ArenaError(f"{length} bytes at {address:#x} are none, or registered already")
            chunks: Addresses = np.arange(address, address + length, self._chunk_bytes, dtype=np.int64)
            self._set(address, _Region(address + length, chunks))
        count, in_place, problem = 0, True, ""
        try:
            for start in chunks.tolist():
                with found.any_context(), found.beside_captures():
                    code = found.register(start, min(self._chunk_bytes, address + length - start))
                    if code:
                        problem = found.error_name(code)
                        break
                    count += 1
                    in_place = in_place and found.is_mapped_in_place(start)
        except ArenaError as error:
            problem = str(error)
        with self._lock:
            self._set(address, _Region(address + length, chunks[:count], count == len(chunks), in_place))
        if problem:
            self.unregister(address)
            raise ArenaError(f"memory cannot be registered with CUDA: {problem}")

    def unregister(self, address: int) -> None:
        """Undo `register(address, ...)`; no copy of the region may be under way. Idempotent.

        Raises ArenaError if some of it stays registered. Its addresses must then never be used for
        anything else: a copy from or to them would go to the old memory.
        """
        with self._lock:
            region = self._regions.get(address)
            if region is None:
                return
            self._set(address, region._replace(whole=False))
        found = driver()
        assert found is not None, "what is registered was registered by the driver"
        left, problem = self._unregister_chunks(found, region.chunks)
        with self._lock:
            self._set(address, region._replace(chunks=left, whole=False) if len(left) else None)
        if problem:
            raise ArenaError(f"host memory stays registered with CUDA: {problem}")

    @staticmethod
    def _unregister_chunks(found: Driver, chunks: Addresses) -> tuple[Addresses, str]:
        """The chunks that stay registered, and why."""
        left: list[int] = []
        problem = ""
        try:
            with found.any_context(), found.beside_captures():
                for start in chunks.tolist():
                    code = found.unregister(start)
                    if code:
                        left.append(start)
                        problem = found.error_name(code)
        except ArenaError as error:
            return chunks, str(error)
        return np.array(left, dtype=np.int64), problem

    def _set(self, address: int, region: _Region | None) -> None:
        """Set or remove a region and publish what is registered now; under the lock."""
        if region is None:
            self._regions.pop(address, None)
        else:
            self._regions[address] = region
        known = sorted(self._regions.items())
        whole = [(start, item) for start, item in known if item.whole]
        borders = [item.chunks for _, item in known]
        self.registered = Registered(
            np.array([start for start, _ in whole], dtype=np.int64),
            np.array([item.end for _, item in whole], dtype=np.int64),
            np.unique(np.concatenate([*borders, np.array([item.end for _, item in known], dtype=np.int64)])),
            all(item.mapped_in_place for _, item in whole),
        )


process_memory = HostMemory()
"""The memory of this process: registrations belong to it as a whole."""
