"""How one forward pass writes K and V into the pool and gathers them for attention, in plain torch.

All index tables are for layer 0 of the blocks: a layer's rows begin at a fixed distance, so that the tables of a pass
serve every layer. Sequences are read in groups (see `ReadGroup`); gathered tensors are `[sequence, kv_head, place,
head_dim]`, and `Places.numbers` gives the token at each place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from tiercache.engine.kv_pool import RAW, BatchSegment, KVPool

UNSEEN = 1 << 40
"""The number of a place that holds no token: later than every query."""


class ReadGroup(NamedTuple):
    """Sequences with the same number of new tokens, which are read together.

    `rows` are their rows of the batch, `[sequence * token]`; `positions` those of their tokens, `[sequence, token]`;
    `tails` come from `KVPool.tails_of`.
    """

    segments: list[BatchSegment]
    tails: list[int]
    rows: slice | torch.Tensor
    positions: torch.Tensor

    def firsts(self, window: int) -> list[int]:
        """The first token of each sequence that its queries see."""
        return [max(0, one.start + 1 - window) if window else 0 for one in self.segments]

    def tables(self, window: int, sinks: int, ends: Sequence[int], size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks that the queries of each sequence see, up to block `ends`: blocks of sinks first.

        Two int64 tensors `[sequence, block]`: the pool blocks, and their numbers. A sequence with fewer blocks is
        filled up with block 0, with numbers from its end on.
        """
        firsts = [max(sinks, first) // size for first in self.firsts(window)]
        begins = [min(sinks // size, end) for end in ends]
        spans = zip(self.segments, begins, firsts, ends, strict=True)
        tables = [[*one.block_table[:a], *one.block_table[b:c]] for one, a, b, c in spans]
        longest = max(map(len, tables))
        ids = torch.tensor([[*table, *[0] * (longest - len(table))] for table in tables], dtype=torch.int64)
        first, begin = torch.tensor(firsts)[:, None], torch.tensor(begins)[:, None]
        number = torch.arange(longest)
        return ids, torch.where(number < begin, number, number + first - begin)


class Places(NamedTuple):
    """The places gathered for a group: `numbers` of the tokens, int64 `[sequence, place]`, from `blocks`, `[sequence *
    block]`.

    Some places hold no token, and are always set to zero: `missing` are those places (raw) or blocks
    (quantised). A quantised pool's `tails` follow the full blocks. The first `skip` places are left out.
    """

    numbers: torch.Tensor
    blocks: torch.Tensor
    missing: torch.Tensor | None = None
    skip: int = 0
    tails: torch.Tensor | None = None


class Access(Protocol):
    """K and V of one pass. `write` takes K and V of its tokens, `[kv_head, token, head_dim]` each.

    `read` returns K and V of all tokens that a group sees, including the new ones: `[sequence, kv_head, place,
    head_dim]` each. They see a `window` (0: all) and the first `sinks` tokens, whole blocks, which come first.
    """

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None: ...
    def places(self, group: ReadGroup, window: int, sinks: int = 0) -> Places: ...
    def read(self, layer: int, places: Places) -> tuple[torch.Tensor, torch.Tensor]: ...


def access_to(pool: KVPool, segments: Sequence[BatchSegment], tails: Sequence[int]) -> Access:
    """The access to K and V for the pool's format."""
    return RawAccess(pool, segments) if pool.layout.format == RAW else QuantisedAccess(pool, segments, tails)


class _RawRows:
    """Raw blocks `[block, layer, 2, slot, kv_head, head_dim]` as rows of one token each, in layer 0."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self.slots = blocks.shape[3]
        self.width = blocks.shape[4] * blocks.shape[5]
        self.block_rows = blocks.shape[1] * 2 * self.slots
        self._rows = blocks.view(-1, self.width)

    def of(self, layer: int, part: int) -> torch.Tensor:
        """Rows of K (part 0) or V (part 1) of a layer, indexed like those of K in layer 0."""
        return self._rows[(2 * layer + part) * self.slots :]

    def write(self, layer: int, ids: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write K and V of tokens, `[token, kv_head * head_dim]` each, to rows `ids`."""
        self.of(layer, 0).index_copy_(0, ids, key)
        self.of(layer, 1).index_copy_(0, ids, value)


class RawAccess:
    """The model's own dtype: tokens are copied in and gathered as they are."""

    def __init__(self, pool: KVPool, segments: Sequence[BatchSegment]) -> None:
        self._pool = pool
        self._rows = _RawRows(pool.blocks)
        self._blocks = pool.blocks.view(-1, self._rows.slots * self._rows.width)
        size, block_rows = self._rows.slots, self._rows.block_rows
        targets = [
            one.block_table[token // size] * block_rows + token % size
            for one in segments
            for token in range(one.start, one.end)
        ]
        self._targets = torch.tensor(targets, device=pool.device)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        width = self._rows.width
        key, value = (part.transpose(0, 1).reshape(-1, width) for part in (key, value))
        self._rows.write(layer, self._targets, key, value)

    def places(self, group: ReadGroup, window: int, sinks: int = 0) -> Places:
        size, device, segments = self._rows.slots, self._pool.device, group.segments
        blocks, numbers = group.tables(window, sinks, [-(-one.end // size) for one in segments], size)
        ids = blocks.to(device).view(-1) * (self._rows.block_rows // size)
        ids = torch.cat([ids, ids + 1])
        if len(segments) == 1 and not sinks:
            [first] = group.firsts(window)
            numbers = torch.arange(first, segments[0].end, device=device)
            return Places(numbers[None], ids, skip=first % size)
        numbers = (numbers[:, :, None] * size + torch.arange(size)).flatten(1).to(device)
        end = torch.tensor([one.end for one in segments], device=device)[:, None]
        missing = (numbers >= end).view(-1).nonzero()[:, 0]
        numbers = torch.where(numbers < end, numbers, UNSEEN)
        return Places(numbers, ids, torch.cat([missing, missing + numbers.numel()]))

    def read(self, layer: int, places: Places) -> tuple[torch.Tensor, torch.Tensor]:
        layout = self._pool.layout
        sequences, count = places.numbers.shape
        rows = self._blocks[2 * layer :].index_select(0, places.blocks)
        if places.missing is not None:
            rows.view(-1, self._rows.width).index_fill_(0, places.missing, 0)
        tokens = rows.view(2, sequences, -1, layout.kv_heads, layout.head_dim)
        key, value = tokens[:, :, places.skip : places.skip + count].transpose(2, 3)
        return key, value


class QuantisedAccess:
    """Full blocks as records, quantised when they become full; the tokens after them raw in a tail."""

    def __init__(self, pool: KVPool, segments: Sequence[BatchSegment], tails: Sequence[int]) -> None:
        block_format = pool.layout.block_format
        assert block_format is not None
        self._pool = pool
        self._format = block_format
        self._size = pool.layout.block_size
        self._records = pool.blocks.view(-1, block_format.record_bytes)
        self._tails = _RawRows(pool.tails)
        self._plan_writes(segments, tails)

    def _plan_writes(self, segments: Sequence[BatchSegment], tails: Sequence[int]) -> None:
        """Which tokens fill which blocks, and which go to tails.

        Tokens of a block begun earlier come from its tail. So the tokens to quantise are taken from the rows of
        the `opened` tails, followed by those of the batch.
        """
        size, device = self._size, self._pool.device
        opened: list[int] = []
        filled: list[int] = []
        sources: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        begun = sum(bool(one.start % size and one.end // size > one.start // size) for one in segments)
        for one, tail in zip(segments, tails, strict=True):
            first, full = one.start // size, one.end // size
            filled += one.block_table[first:full]
            tokens = torch.arange(one.start, max(full * size, one.start))
            if one.start % size and full > first:
                sources.append(torch.arange(one.start % size) + len(opened) * size)
                opened.append(tail)
            sources.append(tokens + (one.row - one.start + begun * size))
            tokens = torch.arange(max(one.start, full * size), one.end)
            kept.append(tokens + (one.row - one.start))
            targets.append(tail * self._tails.block_rows + tokens % size)
        self._opened = torch.tensor(opened, dtype=torch.int64, device=device)
        self._filled = torch.tensor(filled, dtype=torch.int64, device=device) * self._pool.layout.layers
        self._sources, self._kept, self._targets = (torch.cat(parts).to(device) for parts in (sources, kept, targets))

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        key, value = key.transpose(0, 1), value.transpose(0, 1)
        if len(self._filled):
            # Before the tails are written: a sequence's old and new tail are in the same place.
            blocks = [self._full_blocks(layer, part, rows) for part, rows in enumerate((key, value))]
            self._records[layer:].index_copy_(0, self._filled, self._format.encode(*blocks))
        if len(self._kept):
            kept = (part[self._kept].reshape(-1, self._tails.width) for part in (key, value))
            self._tails.write(layer, self._targets, *kept)

    def _full_blocks(self, layer: int, part: int, rows: torch.Tensor) -> torch.Tensor:
        if len(self._opened):
            rows = torch.cat([self._pool.tails[self._opened, layer, part].flatten(0, 1), rows])
        return rows[self._sources].view(-1, self._size, *rows.shape[1:])

    def places(self, group: ReadGroup, window: int, sinks: int = 0) -> Places:
        size, device = self._size, self._pool.device
        fulls = [one.end // size for one in group.segments]
        blocks, numbers = (part.to(device) for part in group.tables(window, sinks, fulls, size))
        slots = torch.arange(size, device=device)
        full = torch.tensor(fulls, device=device)[:, None]
        missing = (numbers >= full).view(-1).nonzero()[:, 0]
        numbers = torch.where(numbers < full, numbers * size, UNSEEN)[:, :, None] + slots
        numbers = numbers.flatten(1)
        tails: torch.Tensor | None = None
        if any(one.end % size for one in group.segments):
            tails = torch.tensor(group.tails, device=device)
            end = torch.tensor([one.end for one in group.segments], device=device)[:, None]
            behind = full * size + slots
            numbers = torch.cat([numbers, torch.where(behind < end, behind, UNSEEN)], dim=1)
        blocks = blocks.view(-1) * self._pool.layout.layers
        return Places(numbers, blocks, missing if len(missing) else None, tails=tails)

    def read(self, layer: int, places: Places) -> tuple[torch.Tensor, torch.Tensor]:
        layout = self._pool.layout
        sequences = len(places.numbers)
        records = self._records[layer:].index_select(0, places.blocks)
        if places.missing is not None:
            records.index_fill_(0, places.missing, 0)
        parts = []
        for part, full in enumerate(self._format.decode(records, layout.dtype)):
            full = full.view(sequences, -1, *full.shape[1:]).transpose(1, 2)
            if places.tails is not None:
                tail = self._pool.tails[places.tails, layer, part].transpose(1, 2)[:, :, None]
                full = torch.cat([full, tail], dim=2)
            parts.append(full.flatten(2, 3))
        return parts[0], parts[1]
