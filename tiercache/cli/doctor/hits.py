"""Explains missing hits: compares what was asked for with what was stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tiercache.cli.doctor.findings import Finding, ok, skipped, warning
from tiercache.cli.readings import Tree, at
from tiercache.ground.units import format_bytes, format_duration
from tiercache.protocol.namespaces import NamespaceSpec

TOPIC = "hits"
TOO_SOON_S = 60.0
"""Blocks evicted sooner than this after their store are seldom asked for again."""
ENOUGH_BLOCKS = 64
HARDLY_USED = 0.05
"""Part of a directory's room: with less in use it is nearly empty."""
_PROBE = "tiercache/probe"

Specs = Mapping[int, NamespaceSpec]


def examine(tree: Tree, specs: Specs) -> list[Finding]:
    """Findings from the figures of a running daemon; `specs` are those of its namespaces."""
    if not tree:
        return [skipped(TOPIC, "hit rate", "no daemon to ask")]
    spaces = [one for one in tree.get("namespaces", []) if one.get("engine") != _PROBE]
    asked, found = _sum(spaces, "asked_blocks"), _sum(spaces, "hit_blocks", "hit_below_blocks")
    # Namespaces of ranks and groups count the same blocks more than once, which does not change the share.
    if not asked:
        return [_nothing_asked(tree, spaces)]
    figure = f"{found / asked:.1%} of {asked:,} blocks asked for"
    if found:
        return [ok(TOPIC, "hit rate", figure), *_losses(tree)]
    return [warning(TOPIC, "hit rate", figure, "see the lines below"), *_why(tree, spaces, specs), *_losses(tree)]


def _sum(rows: Iterable[dict[str, Any]], *names: str) -> int:
    return int(sum(at(row, name) for row in rows for name in names))


def _nothing_asked(tree: Tree, spaces: list[dict[str, Any]]) -> Finding:
    if not spaces:
        remedy = "no engine has registered: is the connector in its settings, with this run directory?"
        return warning(TOPIC, "hit rate", "no block was asked for", remedy)
    stored = _sum(spaces, "stored_blocks")
    remedy = "the engine only stores: does its own prefix cache find all, or is it told to load nothing?"
    if not stored:
        remedy = "engines are connected, but no prompt of a full block has come since the daemon was started"
    return warning(TOPIC, "hit rate", f"no block was asked for; {stored:,} were stored", remedy)


def _why(tree: Tree, spaces: list[dict[str, Any]], specs: Specs) -> Iterator[Finding]:
    """Finding for no hit at all, although blocks were asked for."""
    asked = [one for one in spaces if at(one, "asked_blocks")]
    holding = [one for one in spaces if at(one, "blocks") or at(one, "below_blocks") or at(one, "stored_blocks")]
    if not holding:
        refused, early = int(at(tree, "counters.refused_blocks")), int(at(tree, "counters.refused_populating_blocks"))
        if refused and refused == early:
            remedy = "wait: there was no memory for them yet"
            yield warning(TOPIC, "stores", f"nothing stored; {_populated(tree)}", remedy)
        elif refused:
            remedy = "make the arena larger (--arena), or end pins (`tiercache ls --pins`)"
            yield warning(TOPIC, "stores", f"nothing stored; {refused:,} blocks found no room", remedy)
        else:
            remedy = "the engine stores nothing: is it a producer (kv_role), are prompts longer than a block?"
            yield warning(TOPIC, "stores", "nothing stored", remedy)
        return
    names = {one["id"] for one in holding}
    apart = [one for one in asked if one["id"] not in names]
    for one in apart:
        other = _nearest(one, holding, specs)
        differs = _differences(specs.get(one["id"]), specs.get(other["id"]))
        figure = f"namespace {one['id']} is asked for, {other['id']} holds the blocks: they differ in {differs}"
        remedy = "give both engines the same settings if they should share blocks; otherwise ignore this"
        yield warning(TOPIC, "namespaces", figure, remedy)
    if len(apart) < len(asked):
        remedy = (
            "prompts that begin alike have equal keys only with the same weights, salt and adapter: "
            "`tiercache affinity` shows what of a prompt is stored"
        )
        yield warning(TOPIC, "keys", "blocks are stored where they are asked for, under other keys", remedy)


def _populated(tree: Tree) -> str:
    """How much of its memory the arena has."""
    size, populated = at(tree, "arena.bytes"), at(tree, "arena.populated_bytes")
    if populated < size:
        return f"the arena is still being populated: {format_bytes(populated)} of {format_bytes(size)} so far"
    return "the arena was still being populated"


def _nearest(one: dict[str, Any], others: list[dict[str, Any]], specs: Specs) -> dict[str, Any]:
    """Of the other namespaces, the one that differs least in form."""
    return min(others, key=lambda other: len(_fields(specs.get(one["id"]), specs.get(other["id"]))))


def _fields(one: NamespaceSpec | None, other: NamespaceSpec | None) -> list[str]:
    """Names of the fields in which two specs differ; fields of `extra` are named individually."""
    if one is None or other is None:
        return ["a spec that is not known"]
    names = [name for name in NamespaceSpec.__struct_fields__ if name != "extra"]
    found = [name for name in names if getattr(one, name) != getattr(other, name)]
    extra = one.extra.keys() | other.extra.keys()
    return found + sorted(f"extra.{name}" for name in extra if one.extra.get(name) != other.extra.get(name))


def _differences(one: NamespaceSpec | None, other: NamespaceSpec | None) -> str:
    """The differing fields with both values, as many as fit into a line."""
    if one is None or other is None:
        return "specs that are no longer known"
    shown = []
    for name in _fields(one, other):
        plain, _, key = name.partition("extra.")
        values = (getattr(one, plain), getattr(other, plain)) if plain else (one.extra.get(key), other.extra.get(key))
        shown.append(f"{name} ({str(values[0])[:32]} and {str(values[1])[:32]})")
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "") or "nothing"


def _losses(tree: Tree) -> Iterator[Finding]:
    """Findings for blocks lost that might have been hits."""
    stored_bytes, uptime_s = at(tree, "counters.stored_bytes"), at(tree, "daemon.uptime_s")
    evicted, stored = at(tree, "counters.evicted_blocks"), at(tree, "counters.stored_blocks")
    if evicted >= ENOUGH_BLOCKS and stored_bytes:
        kept_s = at(tree, "arena.bytes") / (stored_bytes / max(1.0, uptime_s))
        figure = f"{int(evicted):,} of {int(stored):,} stored; DRAM holds the last {format_duration(kept_s)} of stores"
        if kept_s < TOO_SOON_S and not tree.get("tiers", {}).get("nvme"):
            remedy = "make the arena larger (--arena), or give it a tier below (--nvme)"
            yield warning(TOPIC, "evictions", figure, remedy)
        else:
            yield ok(TOPIC, "evictions", figure)
    by_quota = at(tree, "counters.refused_by_quota_blocks")
    by_quota_below = at(tree, "tiers.nvme.skipped_by_quota")
    if by_quota or by_quota_below:
        figure = f"blocks refused: {int(by_quota):,} in DRAM, {int(by_quota_below):,} on NVMe"
        full = ", ".join(f"{one['name']} ({one['tier']})" for one in tree.get("quotas", []) if one["refused_blocks"])
        yield warning(TOPIC, "quotas", figure, f"raise --quota or --nvme-quota if these need more: {full}")
    early = at(tree, "counters.refused_populating_blocks")
    if early:
        yield ok(TOPIC, "stores at the start", f"{int(early):,} blocks refused; {_populated(tree)}")
    refused = at(tree, "counters.refused_blocks") - by_quota - early
    if refused > 0:
        remedy = "all frames are pinned, leased or in quarantine: use a larger --arena, or see --quarantine-per-client"
        yield warning(TOPIC, "refused stores", f"{int(refused):,} blocks found no room", remedy)
    skipped_blocks = at(tree, "tiers.nvme.skipped_by_budget")
    if skipped_blocks:
        remedy = "raise --nvme-write-budget, if the disk's endurance allows it"
        yield warning(TOPIC, "write budget", f"{int(skipped_blocks):,} blocks were not written to NVMe", remedy)
    yield from _directories(tree)
    yield from _shared(tree)
    revoked, good = at(tree, "counters.loads_revoked"), at(tree, "counters.loads_good")
    if revoked > max(ENOUGH_BLOCKS, good / 10):
        remedy = "loads take longer than their leases (--lease-ttl-max), or prefixes are flushed: see the engine's log"
        yield warning(
            TOPIC, "loads", f"{int(revoked):,} were revoked before their end, {int(good):,} were good", remedy
        )


def _directories(tree: Tree) -> Iterator[Finding]:
    """A directory that evicts beside one with room."""
    rows = tree.get("tiers", {}).get("nvme", {}).get("directories", [])
    evicting = [one for one in rows if one["evicted_blocks"] >= ENOUGH_BLOCKS]
    empty = [one for one in rows if one["used_bytes"] < one.get("capacity_bytes", 0) * HARDLY_USED]
    if evicting and empty and not tree.get("quotas"):  # quotas evict where there is room
        most, least = max(evicting, key=lambda one: int(one["evicted_blocks"])), empty[0]
        figure = f"{most['path']} evicted {most['evicted_blocks']:,} blocks, {least['path']} is nearly empty"
        remedy = (
            "a directory that was added fills with new prompts; if it stays empty, see the state of both directories, "
            "and whether all prompts continue a single one"
        )
        yield warning(TOPIC, "directories", figure, remedy)


def _shared(tree: Tree) -> Iterator[Finding]:
    """Findings for hits that a shared store had, and that no request got."""
    late, lookups = at(tree, "tiers.shared.lookups_late"), at(tree, "tiers.shared.lookups")
    if late > max(ENOUGH_BLOCKS, lookups / 10):
        figure = f"{int(late):,} requests did not wait for the end of theirs, of {int(lookups):,} in the shared store"
        yield warning(TOPIC, "look-ups", figure, "raise --shared-lookup-timeout, or use a store that is nearer")
    if waiting := int(at(tree, "tiers.shared.flushes_waiting")):
        tries = int(at(tree, "tiers.shared.flush_tries"))
        figure = f"flush not told yet: {waiting:,} notes wait after {tries:,} tries"
        remedy = "bring the store back, or let this daemon write to it; until then other hosts find what was flushed"
        yield warning(TOPIC, "shared flush", figure, remedy)
    if other := int(at(tree, "tiers.shared.other_version_blocks")):
        remedy = "upgrade all hosts of the deployment to one release"
        yield warning(TOPIC, "other release", f"{other:,} blocks in the shared store are in its form", remedy)
    if bad := int(at(tree, "tiers.shared.bad_blocks")):
        remedy = "check that all hosts have the same --shared-key, and who else writes to the store"
        yield warning(TOPIC, "bad blocks", f"{bad:,} in the shared store were not what a host has stored", remedy)
