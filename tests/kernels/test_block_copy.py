"""Block copy: what is refused, the twin, and what the compiler makes of it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")


from tiercache.kernels import block_copy  # noqa: E402

pytestmark = pytest.mark.kernels


def pool(blocks: int = 4, width: int = 8) -> tuple[Any, Any]:
    layers = [torch.arange(blocks * width, dtype=torch.int32).reshape(blocks, width)]
    return layers, block_copy.PoolTable.from_layers(layers)


def test_a_table_says_where_each_piece_is() -> None:
    layers = [torch.zeros(2, 5, 3, 4, dtype=torch.bfloat16) for _ in range(2)]
    table = block_copy.PoolTable.from_layers(layers, block_axis=1)
    first, second = layers[0].data_ptr(), layers[1].data_ptr()
    assert table.bases.tolist() == [first, first + 120, second, second + 120]
    assert table.strides.tolist() == [24] * 4
    assert table.offsets.tolist() == [0, 24, 48, 72]
    assert (table.num_blocks, table.block_bytes, table.align_bytes) == (5, 96, 8)


def test_a_block_with_holes_is_refused() -> None:
    with pytest.raises(ValueError, match="not one run of bytes"):
        block_copy.PoolTable.from_layers([torch.zeros(5, 4, 8)[:, :, :4]])


@pytest.mark.parametrize("ids", [[4], [-1], [0, 1, 1 << 40]])
def test_block_ids_outside_the_pool_are_refused(ids: list[int]) -> None:
    _, table = pool()
    frames = torch.empty(len(ids), table.block_bytes, dtype=torch.uint8)
    with pytest.raises(IndexError, match="pool of 4 blocks"):
        block_copy.gather_blocks(table, ids, frames)


def test_a_scatter_into_one_block_twice_is_refused() -> None:
    _, table = pool()
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
    _, table = pool()
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
