"""Tests of the attention and KV write kernels, for the interpreter and a GPU alike: who imports them has `device`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from tiercache.kernels import kv_write, tile_shapes
from tiercache.kernels import paged_attention as attention
from tiercache.kernels.kv_formats import FORMATS, BlockFormat
from tiercache.kernels.kv_tiles import PagedKv

TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
"""Largest difference from the twin, which computes in float32, for values of about 1."""
CONTEXTS = ((0, 13), (7, 21), (30, 31), (0, 1), (63, 64), (10, 53), (8, 16))
"""New tokens `[start, end)` of the sequences of a batch: whole and cut prompts, decodes, block borders."""
DECODES = ((12, 13), (0, 1), (63, 64), (99, 100))
LAYER, LAYERS = 1, 2


class AttentionCase(NamedTuple):
    """A batch and a pool. `splits` is how many programs share the context of a tile.

    `shape` is how the work is cut up, None for what the engine would choose.
    """

    name: str
    segments: Sequence[tuple[int, int]] = CONTEXTS
    format: str = "raw"
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block: int = 8
    dtype: torch.dtype = torch.float32
    window: int = 0
    softcap: float | None = None
    sinks: bool = False
    heads_first: bool = False
    splits: int = 1
    shape: tile_shapes.TileShape | None = tile_shapes.TileShape(16, 16, 4, 2)


CASES = [
    AttentionCase("grouped heads"),
    AttentionCase("decode", DECODES),
    AttentionCase("decode, split", DECODES, splits=3),
    AttentionCase("more splits than tiles of tokens", DECODES, splits=9),
    AttentionCase("prefill, split", splits=3),
    AttentionCase("window", window=9),
    AttentionCase("window, split", window=21, splits=2),
    AttentionCase("window of one", window=1),
    AttentionCase("softcap", softcap=5.0),
    AttentionCase("sinks", sinks=True),
    AttentionCase("all options, split", DECODES, window=40, softcap=5.0, sinks=True, splits=4),
    AttentionCase("one KV head, odd group", heads=7, kv_heads=1, head_dim=24),
    AttentionCase("no groups, block of 5", heads=3, kv_heads=3, head_dim=20, block=5),
    AttentionCase("float16", dtype=torch.float16, splits=2),
    AttentionCase("bfloat16", dtype=torch.bfloat16),
    AttentionCase("K and V with their heads first", heads_first=True),
    AttentionCase("as the engine cuts it up", shape=None),
    *(
        case._replace(name=f"{name}, {case.name}", format=name)  # rule: of a NamedTuple
        for name in FORMATS
        for case in (
            AttentionCase("grouped heads"),
            AttentionCase("decode, window, split", DECODES, window=21, splits=3),
            AttentionCase("odd sizes", ((0, 50), (47, 48)), heads=3, kv_heads=1, head_dim=96, block=24),
        )
    ),
]


OFTEN = {
    "decode, split",
    "window, split",
    "all options, split",
    "one KV head, odd group",
    "no groups, block of 5",
    "bfloat16",
    "K and V with their heads first",
    "int8, grouped heads",
    "int4, odd sizes",
    "fp8_e5m2, decode, window, split",
}
"""Of what is alike, one case in the first ring."""
assert {case.name for case in CASES} >= OFTEN


class Batch(NamedTuple):
    """Made from a case: the pool before the batch, and what the twin says that must come of it.

    Attributes:
        segments, tables, items, slots: what the kernels take. `items` are the blocks to be quantised, with one
            that is not full; `slots` are those of the raw pool or of the tails.
        written: the pool after the batch.
        read: K and V of each sequence as they are read back, `[token, kv_head, head_dim]`.
    """

    kv: PagedKv
    segments: torch.Tensor
    tables: torch.Tensor
    items: torch.Tensor
    slots: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    written: torch.Tensor
    read: tuple[list[torch.Tensor], list[torch.Tensor]]


def batch_of(case: AttentionCase, device: str) -> Batch:
    """Sequences on shuffled blocks. What was not written is NaN, or the code of a large number: it must not count."""
    needed = [-(-end // case.block) for _, end in case.segments]
    ids = random.Random(1).sample(range(sum(needed) + 3), sum(needed))
    heads = (case.kv_heads, case.head_dim)
    block_format = None if case.format == "raw" else BlockFormat(case.format, case.block, *heads)
    raw_shape = (LAYERS, 2, case.block, *heads)
    tails = torch.full((len(needed) + 2, *raw_shape), float("nan"), dtype=case.dtype)
    if block_format is None:
        pool = torch.full((sum(needed) + 3, *raw_shape), float("nan"), dtype=case.dtype)
    else:
        pool = torch.full((sum(needed) + 3, LAYERS, block_format.record_bytes), 0x7B, dtype=torch.uint8)
        pool[:, :, max(field.offset + field.bytes for field in block_format.fields.values()) :] = 0
    written = pool.clone()
    generator = torch.Generator().manual_seed(2)
    segments: list[tuple[int, ...]] = []
    tables: list[int] = []
    items: list[tuple[int, int]] = []
    slots: list[int] = []
    new: list[torch.Tensor] = []
    read: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    row = 0
    for number, ((start, end), count) in enumerate(zip(case.segments, needed, strict=True)):
        table = [ids.pop() for _ in range(count)]
        segments.append((row, start, end, len(tables), number + 1))
        tables += table
        row += end - start
        content = torch.randn(2, count * case.block, *heads, generator=generator).to(case.dtype)
        content[0] *= 2  # so that the weights differ
        new.append(content[:, start:end].clone())
        whole = end // case.block if block_format else 0
        for block in range(count):
            tokens = content[:, block * case.block : (block + 1) * case.block].clone()
            first = block * case.block
            if block_format is None:
                for target, stop in ((pool, start), (written, end)):
                    target[table[block], LAYER, :, : max(stop - first, 0)] = tokens[:, : max(stop - first, 0)]
                continue
            if block < whole:
                record = block_format.encode(tokens[0], tokens[1])
                written[table[block], LAYER] = record
                decoded = block_format.decode(record, case.dtype)
                content[:, first : first + case.block] = torch.stack(decoded).transpose(1, 2)
                if block < start // case.block:
                    pool[table[block], LAYER] = record
                else:
                    items.append((number, block))
            if block == start // case.block:
                tails[number + 1, LAYER, :, : start - first] = tokens[:, : start - first]
        behind = whole * case.block
        place = [
            table[token // case.block] * case.block if block_format is None else (number + 1) * case.block
            for token in range(start, end)
        ]
        slots += [
            at + token % case.block if token >= behind else -1
            for at, token in zip(place, range(start, end), strict=True)
        ]
        for part in (0, 1):
            read[part].append(content[part, :end].to(device))
    if block_format is not None:
        items.append((0, case.segments[0][1] // case.block))
    key, value = torch.cat(new, dim=1).to(device).transpose(1, 2)
    if case.heads_first:
        key, value = key.contiguous(), value.contiguous()
    pool, tails = pool.to(device), tails.to(device)
    kv = PagedKv.raw(pool) if block_format is None else PagedKv.quantised(pool, block_format, tails)
    words = [torch.tensor(part, dtype=torch.int32, device=device) for part in (segments, tables, items, slots)]
    return Batch(kv, *words, key, value, written, read)


def write(batch: Batch) -> None:
    """K and V of the new tokens, as the engine has them written."""
    if len(batch.items):
        kv_write.write_blocks(batch.kv, LAYER, batch.segments, batch.tables, batch.items, batch.key, batch.value)
    kv_write.write_tokens(batch.kv.tails, LAYER, batch.slots, batch.key, batch.value)


def launch(batch: Batch, case: AttentionCase, device: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Run the kernel; its queries, what it makes of them, and the options for its twin."""
    generator = torch.Generator().manual_seed(3)
    count = batch.key.shape[1]
    query = torch.randn(count, case.heads, case.head_dim, generator=generator).to(device, case.dtype).transpose(0, 1)
    sinks = torch.randn(case.heads, generator=generator).to(device, case.dtype) if case.sinks else None
    group = case.heads // case.kv_heads
    decoding = all(end - start == 1 for start, end in case.segments)
    choose = tile_shapes.decode_shape if decoding else tile_shapes.prefill_shape
    shape = case.shape or choose(group, batch.kv.format, case.dtype)
    lengths = [(number, end - start) for number, (start, end) in enumerate(case.segments)]
    tiles = torch.tensor(tile_shapes.tiles_of(lengths, shape.rows // group), dtype=torch.int32, device=device)
    out = torch.full((count, case.heads, case.head_dim), float("nan"), dtype=case.dtype, device=device)
    options = {"scale": case.head_dim**-0.5, "window": case.window, "softcap": case.softcap, "sinks": sinks}
    rest = {**options, "layer": LAYER, "shape": shape, "splits": case.splits}
    attention.paged_attention(query, batch.kv, batch.segments, batch.tables, tiles, out, **rest)
    return query, out, options


def check_attention(case: AttentionCase, device: str) -> None:
    """What the kernels write is the twin's, byte for byte; what they compute from it is so within rounding."""
    batch = batch_of(case, device)
    write(batch)
    as_bytes = (batch.kv.pool.cpu().view(torch.uint8), batch.written.view(torch.uint8))
    assert torch.equal(*as_bytes)
    query, out, options = launch(batch, case, device)
    starts = [start for start, _ in case.segments]
    expected = attention.paged_attention_reference(query, *batch.read, starts, **options)
    worst = (out.float() - expected).abs().max().item()
    assert worst <= TOLERANCE[case.dtype], f"off by {worst}"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in OFTEN else pytest.mark.stress) for case in CASES],
)
def test_writes_and_attention_equal_the_twins(case: AttentionCase, device: str) -> None:
    check_attention(case, device)


def test_segments_without_tokens_get_zeros(device: str) -> None:
    """And the rows of others are left alone."""
    batch = batch_of(CASES[1], device)
    write(batch)
    batch.segments[1] = torch.tensor([1, 0, 0, 0, 0], dtype=torch.int32)
    tiles = torch.tensor([(number, 0) for number in range(4)], dtype=torch.int32, device=device)
    query = torch.randn(4, 4, 16, device=device).transpose(0, 1)
    options: dict[str, Any] = {"layer": LAYER, "scale": 0.25, "shape": tile_shapes.TileShape(16, 16, 4, 2)}
    for splits in (1, 3):
        out = torch.full((5, 4, 16), 7.0, device=device)
        attention.paged_attention(query, batch.kv, batch.segments, batch.tables, tiles, out, splits=splits, **options)
        assert out[1].eq(0).all()
        assert out[4].eq(7).all()
        assert out[[0, 2, 3]].ne(7).all()


@pytest.mark.parametrize("spread", [pytest.param(0.0, marks=pytest.mark.stress), 2.0])
@pytest.mark.parametrize("name", FORMATS)
def test_records_equal_the_twin(name: str, spread: float, device: str) -> None:
    """Of zeros, ties of rounding, tiny and huge numbers, outliers."""
    generator = torch.Generator().manual_seed(1)
    block_format = BlockFormat(name, 16, 2, 32)
    content = torch.randn(2, 6, 16, 2, 32, generator=generator)
    content *= torch.exp(spread * torch.randn(content.shape, generator=generator))
    content[:, 0] = 0
    content[:, 1] = torch.randint(-8, 9, content[:, 1].shape, generator=generator) / 2
    content[:, 2] *= 1e-40
    content[:, 3] *= 1e30
    content[:, 4, :, :, 5] += 100
    content = content.to(device)
    pool = torch.zeros(6, 1, block_format.record_bytes, dtype=torch.uint8, device=device)
    tails = torch.zeros(1, 1, 2, 16, 2, 32, device=device)
    words = [[(0, 0, 96, 0, 0)], list(range(6)), [(0, block) for block in range(6)]]
    segments, tables, items = (torch.tensor(part, dtype=torch.int32, device=device) for part in words)
    kv = PagedKv.quantised(pool, block_format, tails)
    key, value = content.flatten(1, 2).transpose(1, 2)
    kv_write.write_blocks(kv, 0, segments, tables, items, key, value)
    expected = block_format.encode(content[0], content[1])
    for field in block_format.fields:
        ours, twins = (block_format.view(records, field) for records in (pool[:, 0], expected))
        assert torch.equal(ours.view(torch.uint8), twins.view(torch.uint8)), field
