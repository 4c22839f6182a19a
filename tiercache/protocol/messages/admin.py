"""Requests of operators and watchers, and replies: flush, report, models, statistics, check, inspect, pins, specs."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from .limits import MAX_LISTED, Numbers
from .names import ModelCard
from .replies import Done, Reply
from .requests import Request


class Flushed(Reply, tag="flushed"):
    """Blocks dropped so far; `more`: others are out of sight already and still being freed.

    `kept`: why the shared store has not been told yet, in words; the daemon keeps the flush and tells it later.
    """

    blocks: int
    more: bool = False
    kept: str = ""


class Flush(Request[Flushed], tag="flush"):
    """Drop blocks.

    `tier` is `all` or a tier's name. Empty `namespaces` means every one; `key` empty means
    everything, otherwise that block and all that follow it (in a windowed namespace only that block).
    """

    tier: str
    namespaces: Numbers
    key: bytes


class Report(Request[Done], tag="report"):
    """How the client holds its mapping (`cuda`, `mlock`, `none`), its own counters, its models."""

    registration: str
    counters: Annotated[dict[str, int], msgspec.Meta(max_length=MAX_LISTED)]
    models: Annotated[list[ModelCard], msgspec.Meta(max_length=MAX_LISTED >> 4)] = msgspec.field(default_factory=list)


class ModelList(Reply, tag="model_list"):
    """Models of the open sessions, each once, and the numbers of their namespaces by fingerprint.

    `windows`: the windows of those namespaces that have one, in blocks.
    """

    models: list[ModelCard]
    namespaces: dict[str, int]
    windows: dict[str, int]


class Models(Request[ModelList], tag="models"):
    """The models that clients have announced."""


class StatsReply(Reply, tag="stats_reply"):
    """A tree of raw numbers and short strings; see `daemon/MONITORING.md`."""

    stats: dict[str, Any]


class Stats(Request[StatsReply], tag="stats"):
    """Statistics of the daemon, optionally with `histograms` and with a number of nodes of the prefix tree."""

    histograms: bool = False
    hot_prefixes: int = 0


class CheckReply(Reply, tag="check_reply"):
    """One line for each fault found: none when all is well."""

    findings: list[str]
    blocks: int
    scanned_blocks: int


class Check(Request[CheckReply], tag="check"):
    """Check the daemon's bookkeeping, and blocks on disks against their checksums.

    It is answered once `sample` blocks (-1: all) were read at `bytes_per_s` (0: no limit). The daemon
    serves others meanwhile.
    """

    sample: int = 0
    bytes_per_s: int = 200 << 20


class BlockView(msgspec.Struct, array_like=True, frozen=True):
    """One block in one place.

    Attributes:
        namespace: determines the form of its bytes.
        tier: `dram`, or the name of the tier below.
        place: the directory below; empty in DRAM.
        stored_bytes: its length there, as it was written.
        children: blocks that follow it in this tier.
        pins: leases, pins and stores in progress that keep it.
        codec, checksum: how it was written below, and with which kind of checksum; empty in DRAM.
        idle_s: since a match last ended at it, or it came; None where that is not recorded.
    """

    namespace: int
    tier: str
    place: str
    stored_bytes: int
    children: int
    pins: int
    codec: str = ""
    checksum: str = ""
    idle_s: float | None = None


class Inspected(Reply, tag="inspected"):
    """The places of a block, first those in DRAM, at most MAX_INSPECTED, and how many blocks lead up to it.

    `depth` counts the block itself; 0 if it is in no tier, or only in windowed namespaces, which have no chains.
    `chain`: its keys, if they were requested and are at most MAX_KEYS.
    """

    blocks: list[BlockView]
    depth: int
    chain: bytes = b""


class Inspect(Request[Inspected], tag="inspect"):
    """Where one block is, and what is known of it; changes nothing, not even recency.

    Empty `namespaces` means every one. `chain` asks for the keys from the first block to this one.
    """

    namespaces: Numbers
    key: bytes
    chain: bool = False


class PinView(msgspec.Struct, array_like=True, frozen=True):
    """One pin: its namespaces, the last key that it was set with, what it keeps, and the time left."""

    namespaces: list[int]
    key: bytes
    blocks: int
    held_bytes: int
    left_ms: int


class PinList(Reply, tag="pin_list"):
    """Pins, at most MAX_LISTED_PINS, in order of their end; `limit_bytes` is what all may keep."""

    pins: list[PinView]
    count: int
    limit_bytes: int


class Pins(Request[PinList], tag="pins"):
    """Which prefixes are pinned."""


class SpecList(Reply, tag="spec_list"):
    """Specs by the number of their namespace, up to 1 MiB of them: maps, for `NamespaceSpec.received`."""

    specs: dict[int, dict[str, Any]]


class Specs(Request[SpecList], tag="specs"):
    """The specs of namespaces, in full."""

    namespaces: Numbers


class SettingView(msgspec.Struct, array_like=True):
    """One setting, as TOML; `live`: it can change at run time; `next_start`: the value that a start now would use."""

    key: str
    value: str
    source: str
    live: bool
    next_start: str | None = None


class SettingList(Reply, tag="setting_list"):
    """All settings. `problem`: why `next_start` is not known."""

    settings: list[SettingView]
    problem: str = ""


class Settings(Request[SettingList], tag="settings"):
    """The settings that the daemon runs with."""


class Changed(Reply, tag="changed"):
    """The setting's value now, as TOML, and a note about it."""

    value: str
    note: str = ""


class ChangeSetting(Request[Changed], tag="set"):
    """Change a live setting until the next reload or restart."""

    key: str
    value: str
