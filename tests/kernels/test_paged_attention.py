"""Attention and KV write kernels: the twin, what is refused, what the compiler makes of them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")


from tiercache.kernels import kv_write, tile_shapes  # noqa: E402
from tiercache.kernels import paged_attention as attention  # noqa: E402
from tiercache.kernels.kv_tiles import PagedKv, TileFormat  # noqa: E402

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")]


@pytest.mark.parametrize(("start", "end"), [(0, 40), (33, 40), (39, 40)])
def test_the_twin_is_torchs_own_attention(start: int, end: int) -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(6, end - start, 16, generator=generator)
    key, value = torch.randn(2, end, 2, 16, generator=generator)
    twin = attention.paged_attention_reference(query, [key], [value], [start], scale=0.3)
    mask = torch.ones(end - start, end, dtype=torch.bool).tril(start)
    torchs = torch.nn.functional.scaled_dot_product_attention(
        query[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None], mask, scale=0.3, enable_gqa=True
    )
    assert torch.allclose(twin.transpose(0, 1), torchs[0], atol=1e-5)


def test_the_twin_knows_window_softcap_and_sinks() -> None:
    query, key = torch.tensor([[[2.0]]]), torch.tensor([[[9.0]], [[0.0]], [[1.0]]])
    value = torch.tensor([[[5.0]], [[1.0]], [[3.0]]])
    sinks = torch.tensor([0.5])
    found = attention.paged_attention_reference(
        query, [key], [value], [2], scale=1.0, window=2, softcap=4.0, sinks=sinks
    )
    weights = torch.tensor([0.0, 4.0 * torch.tanh(torch.tensor(0.5)).item(), 0.5]).exp()
    assert found.item() == pytest.approx(((1.0 * weights[0] + 3.0 * weights[1]) / weights.sum()).item(), rel=1e-6)


def test_a_kernel_finds_every_field_of_a_format() -> None:
    """There a format is a `constexpr`, and Triton 3.6 takes an attribute of that first: `value` was one."""
    assert not set(TileFormat._fields) & set(dir(triton.language.constexpr(0)))  # rule: of a NamedTuple


def test_what_does_not_fit_is_refused() -> None:
    kv = PagedKv.raw(torch.zeros(2, 1, 2, 8, 2, 16))
    words = torch.zeros(1, 5, dtype=torch.int32)
    shape = tile_shapes.TileShape(16, 16, 4, 2)
    options: dict[str, Any] = {"layer": 0, "shape": shape, "splits": 1, "scale": 1.0}
    good, out = torch.zeros(4, 3, 16), torch.zeros(3, 4, 16)
    for query, target, text in (
        (torch.zeros(3, 3, 16), out, "3 heads of 16 do not fit 2 KV heads"),
        (torch.zeros(4, 3, 32), out, "4 heads of 32 do not fit"),
        (torch.zeros(64, 3, 16), out, "64 heads of 16 do not fit"),
        (good.transpose(1, 2).contiguous().transpose(1, 2), out, "dense in its last axis"),
        (good, torch.zeros(4, 3, 16).transpose(0, 1), "dense"),
    ):
        with pytest.raises(ValueError, match=text):
            attention.paged_attention(query, kv, words, words, words, target, **options)
    strided = torch.zeros(2, 16, 3).transpose(1, 2)
    with pytest.raises(ValueError, match="dense in their last axis"):
        kv_write.write_tokens(kv.pool, 0, words[0], strided, strided)
    with pytest.raises(ValueError, match="dense in their last axis"):
        kv_write.write_blocks(kv, 0, words, words, words, strided, strided)


def test_tiles_cover_every_query_once_and_the_longest_come_first() -> None:
    assert tile_shapes.tiles_of([(0, 1), (2, 5)], 2) == [(0, 0), (2, 4), (2, 2), (2, 0)]
    assert tile_shapes.tiles_of([(1, 4)], 4) == [(1, 0)]
