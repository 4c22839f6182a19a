"""KV events: which blocks are in which tier, for routers that send a request to where its prefix is.

    arrived, left ─► events, in order ─► batch ─► `Publisher`

The format is vLLM's (`vllm.distributed.kv_events`): a batch is a msgpack array of a time, events and a rank; an event
is a map with its class in `type`. Blocks have the names that their engine gave them. A name that several blocks have in
a tier (of two epochs, or two models) is stored with the first and removed with the last of them.

A block is remembered, tokens and all, for as long as any tier has it: an event tells of each tier that it comes to.
Blocks that came without names, from a shared store or from an earlier life, are in no events until a store names them.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import msgspec

from tiercache.daemon.ground.slices import Steps, finish
from tiercache.protocol.messages import KEY_BYTES, ReceivedRun, unpack_indices

from .publisher import Publisher

BATCH_BYTES = 64 << 10
"""A batch with more than this is full; smaller ones are published at the next tick."""
PUBLISH_NS = 1_000_000
"""Time for encoding and publishing full batches in one turn of the loop; the one in progress is finished."""
FREED_AT_ONCE = 4096
"""Blocks freed in one go after all were cleared."""
MAX_FULL = 64
"""Full batches that may wait; beyond them, each further one publishes one."""
MAX_BLOCK_BYTES = 64 << 10
"""Of what events say of one block: 16000 tokens."""
MAX_EXTRA_BYTES = 128 << 10
"""Extra keys of one run, which are decoded once to check that subscribers can read them."""
MAX_CONTAINERS = 8192
"""Bytes in them that may begin a list or a map: many small ones are slow to decode."""
_CONTAINERS = bytes([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])
MAX_WAITING_BYTES = 16 << 20
"""What events say of stores in progress, per process or tenant of other hosts."""
MAX_FORM_BYTES = 256
"""Of each name that all blocks of a run share."""
MAX_TENANT_BYTES = 256 << 20
"""What is remembered of the blocks of one tenant: about a million of 16 tokens."""
MAX_KNOWN_BYTES = 1 << 30
"""What is remembered of all blocks."""
_BLOCK_BYTES = 256
"""Memory of a block besides what events say of it, approximately."""
BLOCKS_AT_ONCE = 1024
"""Checked in one slice."""
_EVENT_BYTES = 32
"""Size of a block's event without its tokens, approximately."""
_NIL = msgspec.Raw(msgspec.msgpack.encode(None))
_decode_extra = msgspec.msgpack.Decoder(list[Any] | None).decode
"""As subscribers do: vLLM's own expects an array for each block, or nil."""

Hash = int | bytes


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """A run of blocks, each after the one before, has come to a tier."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[msgspec.Raw | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks have left a tier."""

    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """All blocks have left all tiers."""


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None  # the blocks are there for all ranks


class _Form(msgspec.Struct, frozen=True, gc=False):
    """What the blocks of a run have in common."""

    block_size: int
    group: int | None
    kind: str | None
    window: int | None
    lora_id: int | None
    lora_name: str | None
    tenant: str = ""


class Block(msgspec.Struct, gc=False):
    """A block that may be in events; `size` is the approximate memory that it takes.

    `copies` counts the copies in each medium, in units of `Medium.one`.
    """

    hash: Hash
    parent: Hash | None
    tokens: bytes
    extra: msgspec.Raw | None
    form: _Form
    size: int = 0
    copies: int = 0


Named = Callable[[int], "Block | None"]
"""What events say of the block at a position of a store."""


class NamedBlocks:
    """The blocks of a client's store; `bytes` is the size of what events say of all of them."""

    __slots__ = ("__weakref__", "_form", "_run", "_size", "bytes")

    def __init__(self, run: ReceivedRun, block_size: int, tenant: str = "") -> None:
        if run.extra_keys is not None:  # as received they refer to the whole message, and keep it alive
            run = msgspec.structs.replace(run, extra_keys=[extra.copy() for extra in run.extra_keys])
        self._run = run
        self._size = 4 * block_size
        self._form = _Form(block_size, run.group, run.kind, run.window, run.lora_id, run.lora_name, tenant)
        names, extra = run.hashes, run.extra_keys or ()
        self.bytes = len(run.tokens) + _EVENT_BYTES * len(names) + sum(map(_hash_bytes, names)) + sum(map(len, extra))

    @property
    def too_large(self) -> bool:
        """True if a block's event data exceeds the limit. Counted per block: a store may keep only one of its run."""
        run = self._run
        longest = max(map(len, run.extra_keys or ()), default=0)
        hashes = max(map(_hash_bytes, (run.parent, *run.hashes)))
        names = max(len(name or "") for name in (run.kind, run.lora_name))
        return _BLOCK_BYTES + self._size + longest + 2 * hashes > MAX_BLOCK_BYTES or names > MAX_FORM_BYTES

    def check(self) -> bool:
        """True if the extra keys are few enough to be decoded.

        Raises one of `wire.UNREADABLE` for what subscribers could not read: they would lose the whole batch with it.
        """
        extra_keys = self._run.extra_keys or ()
        packed = b"".join(map(bytes, extra_keys))
        containers = len(packed) - len(packed.translate(None, _CONTAINERS))
        if len(packed) > MAX_EXTRA_BYTES or containers > MAX_CONTAINERS:
            return False
        for extra in extra_keys:
            _decode_extra(extra)
        return True

    def __call__(self, place: int) -> Block:
        run, size = self._run, self._size
        parent = run.hashes[place - 1] if place else run.parent
        tokens = run.tokens[place * size : (place + 1) * size]
        extra = run.extra_keys[place] if run.extra_keys else _NIL
        said = None if extra == _NIL else extra
        size_bytes = _BLOCK_BYTES + len(tokens) + len(extra) + _hash_bytes(run.hashes[place]) + _hash_bytes(parent)
        return Block(run.hashes[place], parent, tokens, said, self._form, size_bytes)


def _hash_bytes(name: Hash | None) -> int:
    return len(name) if isinstance(name, bytes) else 0


class Medium:
    """A tier, in the terms of events. `named` counts its blocks of each hash, by KV cache group."""

    __slots__ = ("mask", "name", "named", "one")

    def __init__(self, name: str, one: int, mask: int) -> None:
        self.name = name
        self.one = one
        self.mask = mask
        self.named: defaultdict[int | None, dict[Hash, int]] = defaultdict(dict)


class _Stored:
    """A `BlockStored` that may still grow."""

    __slots__ = ("blocks", "last", "medium")

    def __init__(self, medium: Medium, block: Block) -> None:
        self.medium = medium
        self.blocks = [block]
        self.last = block

    def event(self) -> BlockStored:
        blocks, form = self.blocks, self.last.form
        extra = [block.extra for block in blocks]
        return BlockStored(
            [block.hash for block in blocks],
            blocks[0].parent,
            unpack_indices(b"".join([block.tokens for block in blocks])).tolist(),
            form.block_size,
            form.lora_id,
            self.medium.name,
            form.lora_name,
            extra if any(extra) else None,
            form.group,
            form.kind,
            form.window,
        )


class Events:
    """Which named blocks are in which tier, and which changes have not been published yet. Event loop only.

    A subscriber that listens from the start is told first that there are no blocks.
    """

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.dram = Medium("CPU", 1, 0xFFFF)
        self.storage = Medium("STORAGE", 1 << 16, 0xFFFF << 16)
        self.stored_blocks = 0
        self.removed_blocks = 0
        self.unnamed_blocks = 0
        self.known_bytes = 0
        self._tenant_bytes: Counter[str] = Counter()
        self._blocks: defaultdict[int, dict[bytes, Block]] = defaultdict(dict)  # by namespace and key
        self._pending: list[_Stored | BlockRemoved | AllBlocksCleared] = [AllBlocksCleared()]
        self._pending_bytes = 0
        self._full: deque[list[_Stored | BlockRemoved | AllBlocksCleared]] = deque()  # batches to publish
        self._forgotten: list[dict[Any, Any]] = []  # what was cleared: freeing all of it at once takes long
        self._waiting_bytes: Counter[str] = Counter()  # event data of stores in progress, by process or tenant
        self._touched: set[Hash] | None = None  # hashes of blocks that came or went since a check began
        self._encode = msgspec.msgpack.Encoder().encode

    def known(self, number: int, keys: bytes) -> list[Block | None]:
        """What events say of blocks of a namespace, for when they arrive elsewhere: they may have left by then."""
        blocks = self._blocks[number]
        return [blocks.get(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]

    def waits(self, party: str, named: NamedBlocks) -> bool:
        """True if there is room for what a store says of its blocks; it then counts for as long as it is kept."""
        if self._waiting_bytes[party] + named.bytes > MAX_WAITING_BYTES:
            return False
        self._waiting_bytes[party] += named.bytes
        weakref.finalize(named, self._waits_no_more, party, named.bytes).atexit = False
        return True

    def _waits_no_more(self, party: str, less_bytes: int) -> None:
        self._waiting_bytes[party] -= less_bytes
        if not self._waiting_bytes[party]:
            del self._waiting_bytes[party]

    def arrived(self, medium: Medium, number: int, key: bytes, said: Block | None) -> None:
        """A block of a namespace is in a tier from now on."""
        blocks = self._blocks[number]
        block = blocks.get(key)
        if block is None:
            if said is None or not self._has_room(said):
                return
            block = blocks[key] = said
            block.copies = 0  # it may have been somewhere before, and left
            self._remember(block, block.size)
        block.copies += medium.one
        if self._touched is not None:
            self._touched.add(block.hash)
        named = medium.named[block.form.group]
        count = named[block.hash] = named.get(block.hash, 0) + 1
        if count > 1:
            return
        self.stored_blocks += 1
        last = self._pending[-1] if self._pending else None
        if (
            type(last) is _Stored
            and last.medium is medium
            and last.last.hash == block.parent
            and (last.last.form is block.form or last.last.form == block.form)
        ):
            last.blocks.append(block)
            last.last = block
        else:
            self._pending.append(_Stored(medium, block))
        self._grown(len(block.tokens) + len(block.extra or b""))

    def named_late(
        self, number: int, key: bytes, said: Callable[[], Block | None], on_disks: Callable[[], int]
    ) -> None:
        """A store names a block that DRAM has already, and that may have come without a name, as from a shared store.

        `on_disks()`: how many copies the tier below DRAM has.
        """
        block = self._blocks[number].get(key)
        if block is not None and block.copies & self.dram.mask:
            return
        self.arrived(self.dram, number, key, said())
        for _ in range(on_disks() if block is None else 0):
            self.arrived(self.storage, number, key, None)

    def left(self, medium: Medium, number: int, key: bytes) -> None:
        """A block has left a tier. Nothing happens if it was not known to be there."""
        blocks = self._blocks[number]
        block = blocks.get(key)
        if block is None or not block.copies & medium.mask:
            return
        block.copies -= medium.one
        if self._touched is not None:
            self._touched.add(block.hash)
        if not block.copies:
            del blocks[key]
            self._remember(block, -block.size)
        group = block.form.group
        named = medium.named[group]
        named[block.hash] -= 1
        if named[block.hash]:
            return
        del named[block.hash]
        if not named:
            del medium.named[group]
        self.removed_blocks += 1
        last = self._pending[-1] if self._pending else None
        if type(last) is BlockRemoved and last.medium == medium.name and last.group_idx == group:
            last.block_hashes.append(block.hash)
        else:
            self._pending.append(BlockRemoved([block.hash], medium.name, group))
        self._grown(0)

    def cleared(self) -> None:
        """All blocks were dropped in all tiers; blocks that leave after this are no longer known."""
        for named in (self.dram.named, self.storage.named):
            self._forgotten += named.values()
            named.clear()
        self._forgotten += self._blocks.values()
        self._blocks.clear()
        self._touched = None
        self._tenant_bytes.clear()
        self.known_bytes = 0
        self._pending.append(AllBlocksCleared())

    def _has_room(self, block: Block) -> bool:
        """True if one more block can be remembered. Without room it is in no events, and is cached as any other."""
        tenant = block.form.tenant
        most = self.known_bytes + block.size <= MAX_KNOWN_BYTES
        if most and (not tenant or self._tenant_bytes[tenant] + block.size <= MAX_TENANT_BYTES):
            return True
        self.unnamed_blocks += 1
        return False

    def _remember(self, block: Block, more_bytes: int) -> None:
        self.known_bytes += more_bytes
        if block.form.tenant:
            self._tenant_bytes[block.form.tenant] += more_bytes

    def _grown(self, token_bytes: int) -> None:
        self._pending_bytes += token_bytes + _EVENT_BYTES
        if self._pending_bytes >= BATCH_BYTES:
            self._close_batch()
            if len(self._full) > MAX_FULL:
                self._publish_one()

    def _close_batch(self) -> None:
        if self._pending:
            self._full.append(self._pending)
            self._pending, self._pending_bytes = [], 0

    def _publish_one(self) -> None:
        events = [event.event() if isinstance(event, _Stored) else event for event in self._full.popleft()]
        self.publisher.has_stored |= self.stored_blocks > 0
        self.publisher.publish(self._encode(_Batch(time.time(), events)))

    def work(self) -> bool:
        """Publish full batches, and free what was cleared, a slice of each; True while there is more."""
        for _ in range(FREED_AT_ONCE if self._forgotten else 0):
            if self._forgotten[-1]:
                self._forgotten[-1].popitem()
            else:
                self._forgotten.pop()
                break
        until_ns = time.perf_counter_ns() + PUBLISH_NS
        while self._full:
            self._publish_one()
            if time.perf_counter_ns() >= until_ns:
                break
        return bool(self._full or self._forgotten)

    def flush(self) -> None:
        """Publish everything since the last batch."""
        self._close_batch()
        while self._full:
            self._publish_one()

    def check_integrity(self) -> list[str]:
        """`check`, all of it at once."""
        return finish(self.check())

    def check(self) -> Steps[list[str]]:
        """Where blocks and their counts by hash disagree. Hashes whose blocks come or go meanwhile are left out."""
        blocks = [list(blocks_of.values()) for blocks_of in self._blocks.values()]
        sizes, known_bytes, tenant_bytes = Counter[str](), self.known_bytes, self._tenant_bytes.copy()
        counts = {medium: defaultdict[int | None, Counter[Hash]](Counter) for medium in (self.dram, self.storage)}
        findings, touched = list[str](), set[Hash]()
        self._touched = touched
        try:
            for blocks_of in blocks:
                for number, block in enumerate(blocks_of, 1):
                    sizes[block.form.tenant] += block.size
                    for medium, counted in counts.items():
                        if copies := (block.copies & medium.mask) // medium.one:
                            counted[block.form.group][block.hash] += copies
                    if not number % BLOCKS_AT_ONCE:
                        yield
            for medium, counted in counts.items():
                for group in counted.keys() | medium.named.keys():
                    wrong, named = False, medium.named[group]
                    for number, name in enumerate(list(counted[group].keys() | named.keys()), 1):
                        wrong |= name not in touched and named.get(name, 0) != counted[group][name]
                        if not number % BLOCKS_AT_ONCE:
                            yield
                    # After a clear meanwhile there is nothing left to compare with.
                    if wrong and self._touched is touched:
                        findings.append(f"events do not count the blocks of {medium.name} as they are")
        finally:
            self._touched = None
        if sizes.total() != known_bytes or any(sizes[one] != blocks_of for one, blocks_of in tenant_bytes.items()):
            findings.append("events do not count the bytes of what they remember as they are")
        return findings

    def tick(self) -> None:
        """Publish, of very much a part, and resend what subscribers have missed."""
        self._close_batch()
        self.work()
        self.publisher.tick()

    def close(self) -> None:
        """The daemon ends, and its blocks with it."""
        self.cleared()
        self.flush()
        self.publisher.close()

    def stats(self) -> dict[str, int]:
        """What `stats` shows of events."""
        known = sum(len(blocks) for blocks in self._blocks.values())
        known_counts = {"known_blocks": known, "known_bytes": self.known_bytes, "unnamed_blocks": self.unnamed_blocks}
        counts = {"stored_blocks": self.stored_blocks, "removed_blocks": self.removed_blocks}
        return {**known_counts, **counts, **self.publisher.stats()}
