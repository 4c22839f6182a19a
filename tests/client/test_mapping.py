"""Addresses of frames: none outside its region, however many are looked up at once."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tiercache.arena import create_region
from tiercache.errors import ProtocolError
from tiercache.mapping import FEW, ArenaMapping


@pytest.mark.parametrize("count", [1, FEW, 4 * FEW])
def test_no_frame_outside_its_region_has_an_address(count: int) -> None:
    mapping = ArenaMapping(lambda registration: None)
    fd = create_region(1 << 20, "test")
    try:
        mapping.add([(0, 1 << 20)], [fd])
        frames = np.arange(count, dtype=np.uint64) * 4096
        found = mapping.addresses(frames.tobytes(), 4096, 1.0)
        assert (found - found[0]).tolist() == frames.tolist()
        frames[-1] = (1 << 20) - 4096
        assert mapping.addresses(frames.tobytes(), 4096, 1.0)[-1] == found[0] + (1 << 20) - 4096
        for bad in ((1 << 20) - 4095, 1 << 20, 1 << 40):
            frames[-1] = bad
            with pytest.raises(ProtocolError, match="not inside its region"):
                mapping.addresses(frames.tobytes(), 4096, 1.0)
    finally:
        os.close(fd)
        mapping.end()
        assert mapping.wait_unmapped(60)
