"""Block copy: what is refused."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from tiercache.kernels import block_copy  # noqa: E402

pytestmark = pytest.mark.kernels


def frames(count: int, length: int = 32, dtype: Any = torch.uint8) -> Any:
    return torch.empty(count, length, dtype=dtype)


GATHER, SCATTER = block_copy.gather_blocks, block_copy.scatter_blocks


@pytest.mark.parametrize(
    ("copy", "ids", "frames", "error", "text"),
    [
        (GATHER, [4], frames(1), IndexError, "pool of 4 blocks"),
        (GATHER, [-1], frames(1), IndexError, "pool of 4 blocks"),
        (GATHER, [0, 1, 1 << 40], frames(3), IndexError, "pool of 4 blocks"),
        (SCATTER, [1, 2, 1], frames(3), IndexError, "repeated"),
        (GATHER, [0], frames(2), ValueError, "1 block ids for 2 frames"),
        (GATHER, [0], frames(1, 31), ValueError, "frames of 31 bytes for blocks of 32"),
        (GATHER, [0], frames(1, dtype=torch.int8), ValueError, "contiguous uint8"),
        (GATHER, [0], frames(1, 64)[:, ::2], ValueError, "contiguous uint8"),
    ],
)
def test_copies_that_do_not_fit_are_refused(copy: Any, ids: list[int], frames: Any, error: Any, text: str) -> None:
    pool = block_copy.PoolTable.from_layers([torch.zeros(4, 8, dtype=torch.int32)])
    with pytest.raises(error, match=text):
        copy(pool, ids, frames)


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
    with pytest.raises(ValueError, match="not one run of bytes"):
        block_copy.PoolTable.from_layers([torch.zeros(5, 4, 8)[:, :, :4]])
