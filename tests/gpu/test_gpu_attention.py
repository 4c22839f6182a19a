"""The attention and KV write kernels, compiled, on a real device: the interpreter's cases and larger ones."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from attention_cases import *  # noqa: F403 - the tests
from attention_cases import DECODES, AttentionCase, check_attention

from tiercache.kernels.kv_formats import FORMATS, BlockFormat

pytestmark = pytest.mark.gpu

LONG = ((8191, 8192), (3000, 3001), (0, 1), (511, 512))
CHUNKS = ((0, 700), (2048, 2560), (5000, 5001), (96, 129))
LARGE = [
    case._replace(  # rule: of a NamedTuple
        name=f"{case.name}, {name}",
        format=name,
        heads=32,
        kv_heads=8,
        head_dim=128,
        block=16,
        dtype=torch.bfloat16,
        shape=None,
    )
    for name in ("raw", *FORMATS)
    for case in (
        AttentionCase("long decode", LONG, splits=1),
        AttentionCase("long decode, split", LONG, splits=20),
        AttentionCase("chunks", CHUNKS),
        AttentionCase("chunks, split, all options", CHUNKS, window=300, softcap=30.0, sinks=True, splits=4),
    )
]
SHAPES = [
    AttentionCase("head_dim 256", CHUNKS, head_dim=256, heads=8, block=16, dtype=torch.bfloat16, shape=None),
    AttentionCase("head_dim 96", CHUNKS, head_dim=96, heads=8, kv_heads=8, block=16, dtype=torch.float16, shape=None),
    AttentionCase("head_dim 64 in float32", CHUNKS, head_dim=64, heads=8, block=32, shape=None),
    AttentionCase("many heads for one", DECODES, head_dim=64, heads=71, kv_heads=1, dtype=torch.bfloat16, shape=None),
]


@pytest.mark.parametrize("case", [*LARGE, *SHAPES], ids=lambda case: case.name)
def test_larger_writes_and_attention_equal_the_twins(case: AttentionCase, device: str) -> None:
    check_attention(case, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_torch_makes_and_reads_the_same_bytes_as_on_a_cpu(name: str, dtype: torch.dtype, device: str) -> None:
    """Hosts with a GPU and without share blocks."""
    block_format = BlockFormat(name, 16, 8, 128)
    generator = torch.Generator().manual_seed(7)
    key, value = (torch.randn((2, 64, 16, 8, 128), generator=generator) * 3).to(dtype)
    expected = block_format.encode(key, value)
    found = block_format.encode(key.to(device), value.to(device))
    assert torch.equal(found.cpu(), expected)
    for ours, theirs in zip(block_format.decode(found, dtype), block_format.decode(expected, dtype), strict=True):
        assert torch.equal(ours.cpu(), theirs)
