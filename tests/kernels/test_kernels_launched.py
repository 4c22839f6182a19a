"""Launches as on a GPU, up to the launch itself: Triton's own path from the arguments to a compiled kernel.

No GPU is needed for what this version of Triton makes of each argument, whether it takes the options that we pass, and
what the compiler makes of the kernels.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from attention_cases import DECODES, AttentionCase, batch_of, launch, write  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from tiercache.kernels import block_copy, checksum, kv_write, paged_attention  # noqa: E402

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]

SHARED_MEMORY_BYTES = {80: 163 << 10, 90: 227 << 10}
"""What one program may use, by compute capability."""
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Launches:
    """A driver of Triton for GPUs that are not there: kernels are compiled, and launches only counted.

    The number of a device is its compute capability.
    """

    def __init__(self) -> None:
        self.capability = 90
        self.seen: list[tuple[str, tuple[int, int, int]]] = []
        self.binaries: dict[str, bytes] = {}
        self.launcher_cls = self._launcher
        self.utils = self

    def _launcher(self, source: Any, metadata: Any) -> Any:
        return lambda x, y, z, *rest: self.seen.append((metadata.name, (x, y, z)))

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY_BYTES[device], "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        assert shared <= SHARED_MEMORY_BYTES[device], name
        self.binaries[name] = binary
        return 1, 1, 64, 0, 1024

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def assembly(self, kernel: Any) -> str:
        """What the compiler last made of a kernel."""
        compiled: Any = list(kernel.device_caches[self.capability][0].values())[-1]
        return str(compiled.asm["ptx"])


LAUNCHES = Launches()
"""One for all tests: a kernel keeps the driver that it was compiled with."""


class AsOnAGpu:
    """The attention kernel; without a GPU it computes in float32."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **constants: self._kernel[grid](*arguments, **{**constants, "UPCAST": False})


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    LAUNCHES.seen.clear()
    LAUNCHES.binaries.clear()
    monkeypatch.setattr(driver, "_active", LAUNCHES)
    monkeypatch.setattr(paged_attention, "_attend", AsOnAGpu(paged_attention._attend))
    return LAUNCHES


LARGE = AttentionCase("large", heads=32, kv_heads=8, head_dim=128, block=16, dtype=torch.bfloat16, shape=None)
ATTENTION = [
    *(
        (capability, LARGE._replace(format=name, segments=segments, splits=splits))  # rule: of a NamedTuple
        for capability in (90, 80)
        for name in ("int8", "raw", "fp8_e4m3", "int4")
        for segments, splits in ((DECODES, 2), (LARGE.segments, 1))
    ),
    *(
        (90, LARGE._replace(segments=segments, format=name, head_dim=head_dim, dtype=dtype, **more))  # rule: as above
        for segments in (DECODES, LARGE.segments)
        for name, head_dim, dtype, more in (
            ("raw", 256, torch.bfloat16, {"window": 9, "softcap": 5.0, "sinks": True}),
            ("raw", 96, torch.float32, {}),
            ("int4", 256, torch.bfloat16, {}),
            ("fp8_e5m2", 64, torch.float16, {}),
        )
    ),
]


@pytest.mark.parametrize(
    ("capability", "case"),
    [pytest.param(*one, marks=() if place < 2 else pytest.mark.stress) for place, one in enumerate(ATTENTION)],
)
def test_writes_and_attention_reach_the_launch_and_spill_no_register(
    capability: int, case: AttentionCase, launches: Launches, tmp_path: Path
) -> None:
    launches.capability = capability
    batch = batch_of(case, "cpu")
    write(batch)
    launch(batch, case, "cpu")
    names = [name for name, _ in launches.seen]
    assert names[-2:] == ["_attend", "_combine"] if case.splits > 1 else names[-1] == "_attend"
    assert ("_write_tokens" if case.format == "raw" else "_write_blocks") in names
    for name, binary in launches.binaries.items():
        (tmp_path / name).write_bytes(binary)
        dumped = subprocess.run([CUOBJDUMP, "-res-usage", tmp_path / name], capture_output=True, text=True, check=True)
        assert set(re.findall(r"STACK:(\d+)", dumped.stdout)) == {"0"}, dumped.stdout
    if case.format != "raw":
        # Quotients are rounded as the twin's are.
        assert "div.rn.f32" in launches.assembly(kv_write._write_blocks)
        assert "div.full.f32" not in launches.assembly(kv_write._write_blocks)


@pytest.mark.parametrize(("width", "access"), [(4096, r"v2\.b64|v4\.b32"), (8, "b64"), (2, "b16"), (1, "b8")])
def test_each_access_is_as_wide_as_the_blocks_are_aligned(width: int, access: str, launches: Launches) -> None:
    """A wider one would be an error on a GPU, a narrower one slow."""
    table = block_copy.PoolTable.from_layers([torch.zeros(4, width, dtype=torch.uint8)])
    frames = torch.zeros(2, width, dtype=torch.uint8)
    for copy, ids in ((block_copy.gather_blocks, [3, 1]), (block_copy.scatter_blocks, [0, 2])):
        copy(table, ids, frames)
        found = re.findall(r"st\.global\.((?:v\d\.)?b\d+)", launches.assembly(block_copy._copy_blocks))
        assert found
        assert [one for one in found if not re.fullmatch(access, one)] == []
    assert [kernel for kernel, _ in launches.seen] == ["_copy_blocks"] * 2


def test_checksums_reach_the_launch(launches: Launches) -> None:
    checksum.lane_sums(torch.zeros(2, dtype=torch.int64), 4096)
    assert launches.seen == [("_sum_stripes", (2, 1, 1))]
