"""Registered host memory: what copies are told of it, and what is left when the driver refuses."""

from __future__ import annotations

import numpy as np
import pytest
from fake_driver import FakeDriver

from tiercache.copies import host_memory
from tiercache.copies.host_memory import HostMemory
from tiercache.errors import ArenaError

pytestmark = pytest.mark.kernels


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    monkeypatch.setattr(host_memory, "driver", lambda: made)
    return made


def covers(memory: HostMemory, *addresses: int, length: int = 10) -> bool:
    return memory.registered.covers(np.array(addresses, dtype=np.int64), length)


def test_regions_are_registered_in_chunks(fake: FakeDriver) -> None:
    memory = HostMemory(chunk_bytes=100)
    memory.register(5000, 250)
    memory.register(1000, 100)
    assert fake.held == {5000: 100, 5100: 100, 5200: 50, 1000: 100}
    assert memory.registered.borders.tolist() == [1000, 1100, 5000, 5100, 5200, 5250]
    assert covers(memory, 1000, 1090, 5000, 5095, 5240)
    for outside in (999, 1091, 4995, 5241, 9000):
        assert not covers(memory, 1000, outside)
    memory.unregister(5000)
    memory.unregister(5000)
    assert fake.held == {1000: 100}
    assert not covers(memory, 5000)
    assert covers(memory, 1000)


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_a_region_is_registered_whole_or_not_at_all(fake: FakeDriver, fail_at: int) -> None:
    fake.fail_at = fail_at
    memory = HostMemory(chunk_bytes=100)
    with pytest.raises(ArenaError, match="CUDA_ERROR_2"):
        memory.register(5000, 250)
    assert fake.held == {}
    assert not covers(memory, 5000)
    fake.fail_at = -1
    memory.register(5000, 250)
    assert covers(memory, 5000)


def test_kernels_keep_away_from_memory_that_is_mapped_elsewhere(fake: FakeDriver) -> None:
    memory = HostMemory()
    memory.register(1000, 100)
    assert memory.registered.mapped_in_place
    fake.in_place = False
    memory.register(5000, 100)
    assert not memory.registered.mapped_in_place
    memory.unregister(5000)
    assert memory.registered.mapped_in_place


def test_copies_are_cut_at_chunks_that_are_only_being_registered(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that spans two registrations is refused, and one of them may be there already."""
    memory = HostMemory(chunk_bytes=100)
    seen: list[tuple[list[int], bool]] = []
    register = fake.register

    def watch(address: int, length: int) -> int:
        seen.append((memory.registered.borders.tolist(), covers(memory, 5000)))
        return register(address, length)

    monkeypatch.setattr(fake, "register", watch)
    memory.register(5000, 250)
    assert seen == [([5000, 5100, 5200, 5250], False)] * 3
    assert covers(memory, 5000)


def test_what_the_driver_keeps_is_never_offered_again(fake: FakeDriver) -> None:
    memory = HostMemory(chunk_bytes=100)
    memory.register(5000, 250)
    fake.keeps = 5100
    with pytest.raises(ArenaError, match="stays registered with CUDA: CUDA_ERROR_3"):
        memory.unregister(5000)
    assert fake.held == {5100: 100}
    assert not covers(memory, 5000)
    with pytest.raises(ArenaError, match="registered already"):
        memory.register(5000, 250)
    fake.keeps = -1
    memory.unregister(5000)
    assert fake.held == {}
    memory.register(5000, 250)
    assert covers(memory, 5000)
