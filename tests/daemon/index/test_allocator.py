"""Frames: their owners, when they are free, and how regions change from one size to another."""

from __future__ import annotations

import pytest

from tiercache.daemon.index.allocator import NO_FRAME, Allocator
from tiercache.daemon.index.frame_check import check_frames

REGION = 4 * 4096


def arena(regions: int) -> Allocator:
    allocator = Allocator()
    for region_id in range(regions):
        allocator.add_region(region_id, REGION)
    return allocator


def test_a_frame_that_is_still_being_sent_is_not_given_away() -> None:
    allocator = arena(1)
    large = allocator.size_class(REGION)
    frame = allocator.take(large)
    allocator.hold(frame)
    allocator.hold(frame)
    allocator.give_back(frame)
    assert allocator.take(large) == NO_FRAME
    allocator.unhold(frame)
    assert allocator.take(large) == NO_FRAME
    assert check_frames(allocator, []) == []
    allocator.unhold(frame)
    assert allocator.take(large) == frame


def test_a_frame_given_back_names_no_entry_any_more() -> None:
    allocator = arena(1)
    frame = allocator.take(allocator.size_class(4096))
    allocator.set_entry(frame, 7)
    allocator.hold(frame)
    allocator.give_back(frame)
    entries = allocator.entries_of(0, emptying=False)
    assert entries is not None
    assert list(entries) == [0] * 4
    assert allocator.owned_frames(0) == 1


def test_an_empty_region_changes_its_size_class() -> None:
    allocator = arena(1)
    small, large = allocator.size_class(4096), allocator.size_class(2 * 4096)
    frame = allocator.take(small)
    assert allocator.take(large) == NO_FRAME
    allocator.give_back(frame)
    assert [allocator.take(large), allocator.take(large)] == [0, 2 * 4096]
    assert (small.free, small.frames, large.free, large.frames) == (0, 0, 0, 2)


def test_an_emptying_region_is_free_for_all_once_its_last_frame_is_back() -> None:
    allocator = arena(1)
    small, large = allocator.size_class(4096), allocator.size_class(REGION)
    frames = [allocator.take(small) for _ in range(2)]
    allocator.empty_region(0)
    assert allocator.take(small) == NO_FRAME
    allocator.give_back(frames[0])
    assert allocator.take(large) == NO_FRAME
    assert check_frames(allocator, frames[1:]) == []
    allocator.give_back(frames[1])
    assert allocator.take(large) == 0


def test_an_empty_region_goes_to_no_size_that_it_cannot_hold() -> None:
    allocator = arena(1)
    frame = allocator.take(allocator.size_class(4096))
    allocator.give_back(frame)
    assert allocator.take(allocator.size_class(2 * REGION)) == NO_FRAME
    assert allocator.take(allocator.size_class(REGION)) == 0


@pytest.mark.parametrize("count", [1, 3, 4, 5, 7, 9])
def test_many_are_taken_as_one_after_another_would_be(count: int) -> None:
    one, many = arena(2), arena(2)
    for allocator in (one, many):
        small = allocator.size_class(4096)
        frames = [allocator.take(small) for _ in range(3)]
        allocator.give_back(frames[0])
        allocator.give_back(frames[2])
    singly = [frame for _ in range(count) if (frame := one.take(one.size_class(4096))) != NO_FRAME]
    together = many.take_many(many.size_class(4096), count)
    assert sorted(together) == sorted(singly)
    regions = [[frame for frame in together if frame >> 48 == region] for region in (0, 1)]
    assert all(frames == sorted(frames) for frames in regions)
    assert many.size_class(4096).free == one.size_class(4096).free
    assert many.used_bytes == one.used_bytes
    owned = [4096, *together]
    assert check_frames(many, owned) == []
