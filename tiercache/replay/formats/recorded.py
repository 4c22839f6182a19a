"""Traces written by `tiercache daemon --record FILE`: matches, stores, prefetches, hints and flushes, with hashes.

    {"tiercache_trace":1,"policy":"lru","arena_bytes":...}            first line: the daemon's sizes
    {"t":3,"o":"ns","number":1,"block_tokens":16,"block_bytes":4096}  a namespace, before the first line about it
    {"t":5,"o":"m","n":[1],"had":[4,2],"c":0,"b":0,"at":0,"k":"..."}  a match; daemon/MONITORING.md has the rest

The lines are in the order in which requests reached the daemon.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterable

import msgspec

from tiercache.daemon.tiers.nvme.disk.directory import segments_within
from tiercache.daemon.tiers.nvme.worker.opening import DB_RESERVE_SHARE, fitted_segment_bytes
from tiercache.protocol.messages import KEY_BYTES, Priority
from tiercache.protocol.namespaces import NamespaceSpec
from tiercache.replay.formats.lines import BadLine
from tiercache.replay.formats.mooncake import fields_of, wrong
from tiercache.replay.requests import RequestKind, Told, TraceRequest, plain_spec
from tiercache.replay.simulation import Sizes

VERSION = 1
HASH_BYTES = 12
_PAD = bytes(KEY_BYTES - HASH_BYTES)
_KINDS = {
    "m": RequestKind.LOOK,
    "l": RequestKind.LOOK,
    "p": RequestKind.FETCH,
    "s": RequestKind.KEEP,
    "f": RequestKind.FORGET,
    "h": RequestKind.HINT,
}


class Header(msgspec.Struct):
    """The first line: policy and sizes of the daemon."""

    tiercache_trace: int
    policy: str = "lru"
    clock_s: float = 0.0
    arena_bytes: int = 0
    region_bytes: int = 0
    nvme_bytes: int = 0
    nvme_dirs: int = 0
    nvme_segment_bytes: int = 0
    nvme_write_budget_bytes: int = 0
    headroom_bytes: int = 0


class RecordedLine(msgspec.Struct):
    """Any other line. `o` is the kind; each kind uses some of the other fields."""

    t: int
    o: str
    n: list[int] = []
    k: str = ""
    p: str = ""
    f: int = 0
    b: int = -1
    c: int = -1
    at: int = 0
    had: list[int] = []
    tier: str = ""
    number: int = 0
    block_tokens: int = 0
    block_bytes: int = 0
    window_blocks: int = 0
    dram_only: bool = False
    requests: int = 0
    first: int = 0
    done: bool = False
    return_ms: int = 0
    ttl_ms: int = 0
    priority: int = 0


class Recorded:
    """See `Format`."""

    name = "recorded"

    def fits(self, line: bytes) -> bool:
        """See `Format`."""
        return "tiercache_trace" in fields_of(line)

    def open(self, sample: list[bytes], block_tokens: int | None, block_bytes: Callable[[int], int]) -> RecordedReader:
        """See `Format`."""
        return RecordedReader(header_of(sample))


def header_of(sample: list[bytes]) -> Header:
    """The first line. Raises BadLine."""
    try:
        header = msgspec.json.decode(sample[0], type=Header)
    except msgspec.DecodeError as error:
        raise BadLine(f"the first line is not a header of a recording: {wrong(error)}") from error
    if header.tiercache_trace != VERSION:
        raise BadLine(f"version {header.tiercache_trace} of recordings: this release reads version {VERSION}")
    return header


class RecordedReader:
    """See `Reader`."""

    in_order = True

    def __init__(self, header: Header) -> None:
        self.header = header
        self.lost_requests = 0
        """Requests that the daemon could not write down."""
        self.specs: dict[int, NamespaceSpec] = {}
        self._chains: dict[int, bytes] = {}
        self._decode = msgspec.json.Decoder(RecordedLine).decode
        self._seen_header = False

    @property
    def sizes(self) -> Sizes:
        """The sizes of the recorded daemon; of several directories all the segments together."""
        header, dirs = self.header, self.header.nvme_dirs
        cap_bytes = header.nvme_bytes // dirs if dirs else 0
        segment_bytes = fitted_segment_bytes(cap_bytes, header.nvme_segment_bytes) if dirs else 0
        segments = segments_within(cap_bytes, segment_bytes, cap_bytes // DB_RESERVE_SHARE) if dirs else 0
        return Sizes(
            header.arena_bytes,
            segments * segment_bytes * dirs,
            header.region_bytes,
            segment_bytes,
            header.nvme_write_budget_bytes,
            header.policy,
            header.headroom_bytes,
        )

    def read(self, line: bytes) -> Iterable[TraceRequest]:
        """See `Reader`."""
        if not self._seen_header:
            self._seen_header = True
            return
        try:
            row = self._decode(line)
        except msgspec.DecodeError as error:
            raise BadLine(wrong(error)) from error
        if row.o == "ns":
            self._declare(row)
        elif row.o == "lost":
            self.lost_requests += row.requests
        elif row.o in _KINDS:
            yield self._request(row)
        elif row.o != "end":
            raise BadLine(f"o is {row.o!r}: must be one of {', '.join((*_KINDS, 'ns', 'lost', 'end'))}")

    def end(self) -> Iterable[TraceRequest]:
        """See `Reader`."""
        return ()

    def _declare(self, row: RecordedLine) -> None:
        spec = plain_spec(row.block_tokens, row.block_bytes)
        # Namespaces of one form are told apart by their numbers.
        extra = {"number": str(row.number), **({"tiers": "dram"} if row.dram_only else {})}
        spec = msgspec.structs.replace(spec, window_blocks=row.window_blocks, extra=extra)
        if problem := spec.problem():
            raise BadLine(problem)
        self.specs[row.number] = spec

    def _request(self, row: RecordedLine) -> TraceRequest:
        if not row.n or any(number not in self.specs for number in row.n):
            raise BadLine(f"n is {row.n}: must name namespaces of lines before it")
        kind, rooted = _KINDS[row.o], True
        if row.p:
            keys, first, rooted = _keys(row.p) + _keys(row.k), 1, False
        elif kind is RequestKind.FORGET:
            keys, first = _keys(row.k), 0
        else:
            keys, first = self._chain(row), row.first if kind is RequestKind.HINT else row.f
        blocks = len(keys) // KEY_BYTES
        if not 0 <= first <= blocks:
            raise BadLine(f"f is {first}: must be 0 to {blocks}, the blocks of the chain")
        told = Told(row.done, row.return_ms / 1000, row.ttl_ms / 1000, row.priority)
        if min(told) < 0 or (told.done and told.return_in_s) or told.priority not in (0, *Priority):
            raise BadLine(f"is not a hint: {told}")
        tokens = blocks * self.specs[row.n[0]].block_size
        return TraceRequest(
            self.header.clock_s + row.t / 1000,
            keys,
            tokens,
            kind=kind,
            first=first,
            had=_had(row.had),
            namespaces=tuple(row.n),
            promote=row.o != "l",
            rooted=rooted,
            tier="" if row.tier == "all" else row.tier,
            told=told,
        )

    def _chain(self, row: RecordedLine) -> bytes:
        """The keys of a line: the part it takes from an earlier chain, and the new part."""
        before = self._chains.get(row.b, b"") if row.at else b""
        if row.at < 0 or len(before) < row.at * KEY_BYTES:
            raise BadLine(f"b and at name {row.at} blocks of chain {row.b}, which has {len(before) // KEY_BYTES}")
        keys = before[: row.at * KEY_BYTES] + _keys(row.k)
        if row.k:
            self._chains[row.c] = keys
        return keys


def _had(found: list[int]) -> tuple[int, int]:
    if len(found) not in (0, 2) or any(blocks < 0 for blocks in found):
        raise BadLine(f"had is {found}: must be the blocks that were found in DRAM and below")
    return (found[0], found[1]) if found else (0, 0)


def _keys(text: str) -> bytes:
    """Keys from the part of each that a line holds: 12 bytes, base64. Raises BadLine."""
    try:
        packed = b64decode(text, validate=True)
    except ValueError as error:
        raise BadLine(f"k is not base64: {error}") from error
    if len(packed) % HASH_BYTES:
        raise BadLine(f"k has {len(packed)} bytes: must be {HASH_BYTES} for each block")
    return b"".join(packed[at : at + HASH_BYTES] + _PAD for at in range(0, len(packed), HASH_BYTES))
