"""Addresses of frames: none outside its region, however many are looked up at once."""

from __future__ import annotations

import ctypes
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tiercache.client import mapping as module
from tiercache.client.mapping import FEW, ArenaMapping
from tiercache.copies.arena import Region, create_region
from tiercache.errors import ArenaError, DeadlineExceeded, ProtocolError
from tiercache.protocol.messages import REGION_SHIFT

WAIT_S = 60


@pytest.mark.parametrize("count", [1, FEW, 4 * FEW])
def test_no_frame_outside_its_region_has_an_address(count: int) -> None:
    mapping = ArenaMapping(lambda registration: None)
    fd = create_region(1 << 20, "test")
    try:
        mapping.add([(0, 1 << 20)], [fd])
        frames = np.arange(count, dtype=np.uint64) * 4096
        found = mapping.addresses(frames.tobytes(), 4096, 60.0)
        assert (found - found[0]).tolist() == frames.tolist()
        frames[-1] = (1 << 20) - 4096
        assert mapping.addresses(frames.tobytes(), 4096, 60.0)[-1] == found[0] + (1 << 20) - 4096
        for bad in ((1 << 20) - 4095, 1 << 20, 1 << 40):
            frames[-1] = bad
            with pytest.raises(ProtocolError, match="not inside its region"):
                mapping.addresses(frames.tobytes(), 4096, 60.0)
    finally:
        os.close(fd)
        mapping.end()


@contextmanager
def region(size_bytes: int = 1 << 20) -> Iterator[int]:
    fd = create_region(size_bytes, "test")
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.fixture
def unmapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Regions that are unmapped. Their addresses say nothing: another thread may get them at once."""
    found: list[int] = []
    unmap = Region.unmap

    def note(self: Region) -> None:
        found.append(self.region_id)
        unmap(self)

    monkeypatch.setattr(Region, "unmap", note)
    return found


def packed(region_id: int) -> bytes:
    return (region_id << REGION_SHIFT).to_bytes(8, "little")


def test_a_region_is_mapped_once_and_its_number_is_bounded() -> None:
    mapping = ArenaMapping(lambda registration: None)
    try:
        with region() as fd:
            mapping.add([(3, 1 << 20)], [fd])
            address = mapping.addresses(packed(3), 4096, 60.0)
            for bad in (3, -1, 1 << (64 - REGION_SHIFT)):
                with pytest.raises(ProtocolError, match="out of range or was sent twice"):
                    mapping.add([(bad, 1 << 20)], [fd])
            with pytest.raises(ProtocolError, match="2 regions came with 1 descriptors"):
                mapping.add([(4, 1 << 20), (5, 1 << 20)], [fd])
        assert mapping.addresses(packed(3), 4096, 60.0) == address
    finally:
        mapping.end()


def test_a_thread_that_waits_for_a_region_learns_that_none_will_come() -> None:
    mapping = ArenaMapping(lambda registration: None)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            mapping.addresses(packed(7) * FEW, 4096, WAIT_S)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    mapping.end()
    thread.join(WAIT_S)
    assert [type(error) for error in errors] == [DeadlineExceeded]


def test_the_mapping_goes_with_the_last_copy(unmapped: list[int]) -> None:
    ready = threading.Event()
    mapping = ArenaMapping(lambda registration: ready.set())
    with region() as fd:
        mapping.add([(0, 1 << 20)], [fd])
        address = int(mapping.addresses(packed(0), 4096, 60.0)[0])
        assert ready.wait(WAIT_S), "the thread that touches all pages is a user, too"
        for _ in range(2):
            assert mapping.begin_copy()
        mapping.end()
        assert not mapping.begin_copy()
        mapping.end_copy()
        assert unmapped == []
        ctypes.memset(address, 7, 1 << 20)
        mapping.end_copy()
        assert unmapped == [0]
        mapping.add([(1, 1 << 20)], [fd])
        with pytest.raises(DeadlineExceeded):
            mapping.addresses(packed(1), 4096, 60.0)


@pytest.mark.parametrize("kept", [True, False])
def test_what_the_driver_keeps_stays_mapped(monkeypatch: pytest.MonkeyPatch, unmapped: list[int], kept: bool) -> None:
    """Else the addresses would be mapped anew for something else, and the GPU could still write there."""

    class Driver:
        def register(self, address: int, size_bytes: int) -> None:
            pass

        def unregister(self, address: int) -> None:
            if kept:
                raise ArenaError("as the test wants it")

    monkeypatch.setattr(module, "process_memory", Driver())
    ready = threading.Event()
    mapping = ArenaMapping(lambda registration: ready.set(), cuda=True)
    with region() as fd:
        mapping.add([(0, 1 << 20)], [fd])
        assert ready.wait(WAIT_S)
        assert mapping.registration == "cuda"
        mapping.end()
    assert unmapped == ([] if kept else [0])


def test_memory_that_could_shrink_or_is_of_another_size_is_not_mapped() -> None:
    """A file that shrinks under a copy kills the process."""
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 1 << 20)
        with pytest.raises(ArenaError, match="not 1048576 and sealed"):
            Region(0, fd, 1 << 20)
        fcntl.fcntl(fd, 1033, fcntl.F_SEAL_SHRINK if hasattr(fcntl, "F_SEAL_SHRINK") else 2)
        with pytest.raises(ArenaError, match="and sealed"):
            Region(0, fd, 1 << 20)
    finally:
        os.close(fd)
    with region() as sealed, pytest.raises(ArenaError, match="1048576 bytes with seals"):
        Region(0, sealed, 1 << 21)
    with open("/dev/null", "rb") as file, pytest.raises(ArenaError, match="not a memory file"):
        Region(0, file.fileno(), 0)
