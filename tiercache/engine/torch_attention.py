"""Attention over the pool in plain torch, for CPUs.

A prompt's chunk is read and computed by itself. Sequences of one new token each are read together if their
lengths are similar: on a CPU the calls cost as much as the work. The query heads of a KV head are rows of
one matrix, so that K and V are read once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from tiercache.engine.kv_pool import RAW, BatchSegment, KVPool

# --- reading and writing the pool --------------------------------------------------------------------
#
# All index tables are for layer 0 of the blocks: a layer's rows begin at a fixed distance, so that the tables of a pass
# serve every layer. Sequences are read in groups (see `ReadGroup`); gathered tensors are `[sequence, kv_head, place,
# head_dim]`, and `Places.numbers` gives the token at each place.

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


# --- attention sinks ---------------------------------------------------------------------------------
#
# A model's output degrades when it no longer sees the first tokens, even if they mean little: surplus attention goes
# there. So they stay visible, beside a window (Xiao, Tian, Chen, Han and Lewis, Efficient Streaming Language Models
# with Attention Sinks, 2023). As in that paper, positions are those in the cache: with S sinks and a window of W, token
# p sees the sinks as if it were at S + W - 1, and never at a distance beyond the trained ones.
#
# The pool holds keys as the model rotated them, by their absolute positions. Only differences count, and those within
# the window are right. So keys stay as they are, and a query is rotated back for the sinks, by `p - (S + W - 1)`. The
# rotation of a layer is found by experiment: the model is run at two positions, and the queries compared.

_EXACT_POSITIONS = 1 << 18
"""Radians at which a float32 angle is off by a hundredth: no more than bfloat16 loses."""


class Rotation(NamedTuple):
    """Rotary positions of a layer: the first `2 * len(frequencies)` elements of a head, in two halves, are turned.

    `frequencies` are float64 `[pair]`, radians per position (Su et al., RoFormer, 2021).
    """

    frequencies: torch.Tensor

    def turn(self, query: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        """`query` `[..., token, head_dim]` as if each token were `distance` `[..., token]` further on."""
        angles = distance.double()[..., None] * self.frequencies
        cos, sin = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
        half = len(self.frequencies)
        first, second, rest = query[..., :half], query[..., half : 2 * half], query[..., 2 * half :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class Streaming(NamedTuple):
    """How layers without a window of their own attend, instead of seeing everything.

    `rotations` has one entry per layer.
    """

    window: int
    sinks: int
    rotations: dict[int, Rotation]

    def query_for_sinks(self, layer: int, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Queries rotated for the sinks.

        `[sequence, head, token, head_dim]`, of tokens at `positions` `[sequence, token]`.
        """
        back = (positions - (self.sinks + self.window - 1)).clamp(min=0)
        return self.rotations[layer].turn(query, -back[:, None])


def longest_sequence(context: int) -> int:
    """The most tokens of a sequence in which no token sees further than `context`."""
    return max(context, _EXACT_POSITIONS)


# --- attention ---------------------------------------------------------------------------------------

_ROWS_LIMIT = 64
"""Up to this many query tokens the heads of a KV head become rows. Above, matrices are large enough, and
masks cost the most."""
_CALL_BYTES = 128 << 10
"""Reading this much costs about as much as a call for another group."""
_GROUP_BYTES = 2 << 20
"""Limit of K and V of a group and layer, so that they are still in the processor's cache when used."""


class _Reading(NamedTuple):
    """What to gather for a group, and what to add to its scores; `causal` if that hides only later tokens."""

    places: Places
    mask: torch.Tensor | None
    causal: bool


class TorchPass:
    """One forward pass over `segments`, in the order of their tokens in the batch, without gaps.

    With `streaming`, layers without a window attend as it says. `tails` are the segments' tails, if they were
    taken together with those of other passes.

    Attributes:
        positions: int64 `[token]`.
    """

    def __init__(
        self,
        pool: KVPool,
        segments: Sequence[BatchSegment],
        streaming: Streaming | None = None,
        *,
        tails: Sequence[int] | None = None,
    ) -> None:
        self._streaming = streaming
        self._tails = pool.tails_of(segments) if tails is None else tails
        self._access = access_to(pool, segments, self._tails)
        self._device = pool.device
        positions = [token for one in segments for token in range(one.start, one.end)]
        self.positions = torch.tensor(positions, device=pool.device)
        self._groups = [self._group(segments, chosen) for chosen in _alike(segments, pool.layout.token_bytes)]
        self._plans: dict[tuple[int, int], list[_Reading]] = {}

    def _group(self, segments: Sequence[BatchSegment], chosen: list[int]) -> ReadGroup:
        count = segments[chosen[0]].end - segments[chosen[0]].start
        first = segments[chosen[0]].row
        rows: slice | torch.Tensor = slice(first, first + count * len(chosen))
        if chosen != list(range(chosen[0], chosen[0] + len(chosen))):
            rows = torch.tensor([segments[index].row for index in chosen], device=self._device)
        positions = self.positions[rows].view(len(chosen), count)
        members, tails = [segments[index] for index in chosen], [self._tails[index] for index in chosen]
        return ReadGroup(members, tails, rows, positions)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write K and V of the pass's tokens into the pool, and attend.

        Query is `[head, token, head_dim]`, key and value `[kv_head, token, head_dim]`; returns `[token, head,
        head_dim]`. `sinks` are additional scores for every query of a head, `[head]`.
        """
        self._access.write(layer, key, value)
        heads, count, head_dim = query.shape
        out = query.new_empty((count, heads, head_dim))
        streaming = None if window else self._streaming
        seen = (streaming.window, streaming.sinks) if streaming is not None else (window, 0)
        for group, reading in zip(self._groups, self._plan(*seen, query.dtype), strict=True):
            k, v = self._access.read(layer, reading.places)
            q = query[:, group.rows].view(heads, *group.positions.shape, head_dim).transpose(0, 1)
            if streaming is not None:
                turned = streaming.query_for_sinks(layer, q, group.positions)
                scores = torch.cat(
                    [_scores(turned, k[:, :, : streaming.sinks]), _scores(q, k[:, :, streaming.sinks :])], dim=-1
                )
                result = _weighed(scores * scale, v, reading.mask, softcap, sinks)
            elif softcap is None and sinks is None:
                result = _fused(q, k, v, reading, scale)
            else:
                result = _weighed(_scores(q, k) * scale, v, reading.mask, softcap, sinks)
            result = result.transpose(1, 2).flatten(0, 1)
            if len(self._groups) == 1:
                return result
            out[group.rows] = result
        return out

    def _plan(self, window: int, sinks: int, dtype: torch.dtype) -> list[_Reading]:
        """How each group is read; the same for all layers with the same window and sinks."""
        plan = self._plans.get((window, sinks))
        if plan is None:
            plan = [self._reading(group, window, sinks, dtype) for group in self._groups]
            self._plans[window, sinks] = plan
        return plan

    def _reading(self, group: ReadGroup, window: int, sinks: int, dtype: torch.dtype) -> _Reading:
        places = self._access.places(group, window, sinks)
        mask = _mask(group.positions, places.numbers, window, sinks, dtype)
        unbounded = not window or window >= group.segments[0].end
        return _Reading(places, mask, unbounded and torch.equal(places.numbers, group.positions))


def _alike(segments: Sequence[BatchSegment], token_bytes: int) -> list[list[int]]:
    """Numbers of the segments read together: those with one token and of about the same length."""
    groups = [[index] for index, one in enumerate(segments) if one.end - one.start > 1]
    group: list[int] = []
    longest = 0
    singles = (index for index, one in enumerate(segments) if one.end - one.start == 1)
    for index in sorted(singles, key=lambda index: segments[index].end):
        end = segments[index].end
        padding = (end - longest) * len(group) * token_bytes
        if not group or padding > _CALL_BYTES or end * (len(group) + 1) * token_bytes > _GROUP_BYTES:
            group = []
            groups.append(group)
        group.append(index)
        longest = end
    return [sorted(group) for group in groups]


def _mask(
    positions: torch.Tensor, numbers: torch.Tensor, window: int, sinks: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """What to add to the scores, `[sequence, 1, token, place]`; None if nothing is hidden."""
    query, token = positions[:, :, None], numbers[:, None, :]
    hidden = token > query
    if window:
        hidden |= (token <= query - window) & (token >= sinks)
    if not bool(hidden.any()):
        return None
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, -math.inf)[:, None]


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, reading: _Reading, scale: float
) -> torch.Tensor:
    """torch's attention: query `[n, head, token, head_dim]`, key and value `[n, kv_head, place, head_dim]`."""
    sequences, heads, count, head_dim = query.shape
    kv_heads = key.shape[1]
    group, mask = heads // kv_heads, reading.mask
    if count <= _ROWS_LIMIT or query.is_cuda:
        rows = query.reshape(sequences, kv_heads, group * count, head_dim)
        if mask is not None and count > 1:
            mask = mask.repeat(1, 1, group, 1)
        out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
        return out.reshape(query.shape)
    # A prompt's first chunk: half of its scores need not be computed at all.
    mask = None if reading.causal else mask
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=reading.causal, scale=scale, enable_gqa=group > 1
    )


def _scores(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Query `[n, head, token, head_dim]` and key `[n, kv_head, place, head_dim]` to `[n, head, token, place]`."""
    sequences, heads, count, head_dim = query.shape
    rows = query.reshape(sequences, key.shape[1], -1, head_dim)
    return (rows @ key.transpose(2, 3)).view(sequences, heads, count, -1)


def _weighed(
    scores: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention from its scores, which may be capped (Gemma 2), have a sink per head (GPT-OSS), or use two queries."""
    sequences, heads, count, places = scores.shape
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, heads, 1, 1).expand(sequences, heads, count, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    weights = weights.reshape(sequences, value.shape[1], -1, places)
    return (weights @ value).view(sequences, heads, count, -1)
