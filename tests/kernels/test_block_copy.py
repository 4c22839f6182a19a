"""Block copy: what is refused."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")


from tiercache.kernels import block_copy  # noqa: E402

pytestmark = pytest.mark.kernels


def pool() -> Any:
    """Four blocks of 32 bytes."""
    return block_copy.PoolTable.from_layers([torch.zeros(4, 8, dtype=torch.int32)])


def test_a_block_with_holes_is_refused() -> None:
    with pytest.raises(ValueError, match="not one run of bytes"):
        block_copy.PoolTable.from_layers([torch.zeros(5, 4, 8)[:, :, :4]])


@pytest.mark.parametrize("ids", [[4], [-1], [0, 1, 1 << 40]])
def test_block_ids_outside_the_pool_are_refused(ids: list[int]) -> None:
    table = pool()
    frames = torch.empty(len(ids), table.block_bytes, dtype=torch.uint8)
    with pytest.raises(IndexError, match="pool of 4 blocks"):
        block_copy.gather_blocks(table, ids, frames)


def test_a_scatter_into_one_block_twice_is_refused() -> None:
    table = pool()
    with pytest.raises(IndexError, match="repeated"):
        block_copy.scatter_blocks(table, [1, 2, 1], torch.empty(3, table.block_bytes, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        (torch.empty(2, 32, dtype=torch.uint8), "1 block ids for 2 frames"),
        (torch.empty(1, 31, dtype=torch.uint8), "frames of 31 bytes for blocks of 32"),
        (torch.empty(1, 32, dtype=torch.int8), "contiguous uint8"),
        (torch.empty(1, 64, dtype=torch.uint8)[:, ::2], "contiguous uint8"),
    ],
)
def test_frames_that_do_not_fit_are_refused(frames: Any, text: str) -> None:
    table = pool()
    with pytest.raises(ValueError, match=text):
        block_copy.gather_blocks(table, [0], frames)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (([0], [8], [16], 1), "at most its stride"),
        (([0], [8], [0], 1), "at most its stride"),
        (([], [], [], 1), "at least one segment"),
        (([0], [8], [8], 0), "one block"),
    ],
)
def test_segments_that_make_no_pool_are_refused(rows: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        block_copy.PoolTable.from_segments(*rows, device="cpu")
