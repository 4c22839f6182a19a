"""Launches as on a GPU, up to the launch itself: Triton's own path from the arguments to a compiled kernel.

The compile tests next door state signatures and constants themselves. Here they come from the calls, as on a GPU: what
this version of Triton makes of each argument, and whether it takes the options that we pass.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from attention_cases import AttentionCase, batch_of, write  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from tiercache.kernels import block_copy, checksum, tile_shapes  # noqa: E402
from tiercache.kernels.paged_attention import paged_attention  # noqa: E402

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]


class Launches:
    """A driver of Triton for an sm_90 that is not there: kernels are compiled, and launches only counted."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, tuple[int, int, int]]] = []
        self.launcher_cls = self._launcher
        self.utils = self

    def _launcher(self, source: Any, metadata: Any) -> Any:
        return lambda x, y, z, *rest: self.seen.append((metadata.name, (x, y, z)))

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        assert binary
        return 1, 1, 64, 0, 1024

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    made = Launches()
    monkeypatch.setattr(driver, "_active", made)
    return made


@pytest.mark.parametrize(
    "name", ["raw", *(pytest.param(name, marks=pytest.mark.stress) for name in ("fp8_e4m3", "int8", "int4"))]
)
def test_writes_and_attention_reach_the_launch(name: str, launches: Launches) -> None:
    shape = {"heads": 8, "kv_heads": 2, "head_dim": 64, "block": 16}
    case = AttentionCase("decode", ((30, 33), (0, 1)), format=name, **shape, splits=2)
    batch = batch_of(case._replace(dtype=torch.bfloat16), "cpu")  # rule: of a NamedTuple
    write(batch)
    assert {kernel for kernel, _ in launches.seen} >= {"_write_tokens" if name == "raw" else "_write_blocks"}
    tiles = torch.tensor([(0, 0), (1, 0)], dtype=torch.int32)
    query, out = (torch.zeros(*sizes, dtype=torch.bfloat16) for sizes in ((8, 4, 64), (4, 8, 64)))
    paged_attention(
        query,
        batch.kv,
        batch.segments,
        batch.tables,
        tiles,
        out,
        layer=0,
        shape=tile_shapes.decode_shape(4, batch.kv.format, torch.bfloat16),
        splits=2,
        scale=0.125,
    )
    assert launches.seen[-2:] == [("_attend", (2, 2, 2)), ("_combine", (2, 2, 1))]


def test_block_copies_and_checksums_reach_the_launch(launches: Launches) -> None:
    table = block_copy.PoolTable.from_layers([torch.zeros(4, 1024, dtype=torch.int32)])
    frames = torch.zeros(2, 4096, dtype=torch.uint8)
    block_copy.gather_blocks(table, [3, 1], frames)
    block_copy.scatter_blocks(table, [0, 2], frames)
    checksum.lane_sums(torch.zeros(2, dtype=torch.int64), 4096)
    assert [kernel for kernel, _ in launches.seen] == ["_copy_blocks", "_copy_blocks", "_sum_stripes"]
    assert launches.seen[-1][1][:2] == (2, 1)
