"""`tiercache flush`: forget blocks."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from tiercache.cli.connection import connected
from tiercache.cli.declare import Address, Json, command
from tiercache.cli.exit_status import EXIT_OK
from tiercache.cli.report import print_json
from tiercache.errors import ConfigError, ProtocolError
from tiercache.protocol.messages import KEY_BYTES, Flush, Flushed

TIERS = ("all", "dram", "shared")
FLUSH_DEADLINE_S = 60.0
"""Deadline: the daemon forgets millions of blocks in slices, and serves other clients in between."""


@command(
    "flush",
    """\
  tiercache flush                     forget everything, after asking
  tiercache flush --yes --namespace 9f3a
                                      forget the blocks of one namespace (see `tiercache stats`)
  tiercache flush --yes --prefix 00112233445566778899aabbccddeeff
                                      forget one block and all that follow it
                                      (in a windowed namespace only that block)
  tiercache flush --tier shared       forget what hosts share, for every host of the deployment
""",
)
def flush(
    tier: Annotated[str, typer.Option("--tier", metavar="all|dram|shared", help="Tiers to forget them in.")] = "all",
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", metavar="ID", help="Number of a namespace, or the start of its fingerprint."),
    ] = None,
    prefix: Annotated[
        str | None, typer.Option("--prefix", metavar="HEXKEY", help="Key of a block, 32 hex digits.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Forget blocks. Loads under way become misses: requests take longer, but do not fail."""
    if tier not in TIERS:
        raise ConfigError(f"--tier = {tier}: must be one of: {', '.join(TIERS)}")
    key = parse_key(prefix)
    if not yes and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError("flush asks before it forgets, and there is no terminal to ask on: give --yes")
    with connected(address) as client:
        stats = client.stats()
        has_shared = "shared" in stats.get("tiers", {})
        if tier == "shared" and not has_shared:
            raise ConfigError("--tier = shared: this daemon has no shared tier (its setting shared is empty)")
        namespaces = [] if namespace is None else [find_namespace(stats, namespace)]
        if not yes:
            typer.confirm(question(stats, tier, namespace, prefix), abort=True, err=True)
        reply = client.call(Flush, timeout_s=FLUSH_DEADLINE_S, tier=tier, namespaces=namespaces, key=key)
    if not isinstance(reply, Flushed):
        raise ProtocolError(f"a flush was answered with {type(reply).__name__}")
    blocks, kept = reply.blocks, reply.kept
    if as_json:
        named = {"tier": tier, "namespaces": namespaces, "prefix": key.hex()}
        print_json({"flushed_blocks": blocks, **named, "shared_store_told": not kept if has_shared else None})
    else:
        print(outcome(blocks, tier, has_shared, kept))
    return EXIT_OK


def outcome(blocks: int, tier: str, has_shared: bool, kept: str = "") -> str:
    """What was flushed. How many blocks a shared store had, no host knows."""
    if kept:
        return f"{blocks:,} blocks flushed here; {kept}"
    if tier == "shared":
        return "flushed: no host finds these blocks in the shared store any more"
    if tier == "all" and has_shared:
        return f"{blocks:,} blocks flushed here, and no host finds them in the shared store any more"
    return f"{blocks:,} blocks flushed"


def parse_key(prefix: str | None) -> bytes:
    """A key from 32 hex digits; the empty key, which stands for everything, from None."""
    if prefix is None:
        return b""
    try:
        key = bytes.fromhex(prefix)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"--prefix = {prefix}: must be the key of a block, {2 * KEY_BYTES} hex digits")
    return key


def find_namespace(stats: dict[str, Any], wanted: str) -> int:
    """The id of the only namespace with this number, or with a fingerprint that starts so."""
    known = {int(row["id"]): str(row.get("fingerprint", "")) for row in stats.get("namespaces", [])}
    if wanted.isdecimal() and int(wanted) in known:
        return int(wanted)
    start = wanted.lower()
    found = [number for number, fingerprint in known.items() if start and fingerprint.startswith(start)]
    if len(found) == 1:
        return found[0]
    problem = f"is the start of {len(found)} fingerprints" if found else "no such namespace"
    there = ", ".join(f"{number} ({fingerprint})" for number, fingerprint in known.items()) or "none yet"
    raise ConfigError(f"--namespace = {wanted}: {problem}: there are {there}")


def question(stats: dict[str, Any], tier: str, namespace: str | None, prefix: str | None) -> str:
    """The question that names what is about to be forgotten."""
    what = "all blocks"
    if prefix is not None:
        what = f"block {prefix[:8]}... and all that follow it (in a windowed namespace only that block)"
    whose = "every namespace" if namespace is None else f"namespace {namespace}"
    where = "all tiers" if tier == "all" else tier
    tiers = stats.get("tiers", {})
    held = sum(int(figures.get("blocks", 0)) for figures in tiers.values())
    warning = ""
    if "shared" in tiers and tier in ("all", "shared"):
        warning = "The shared store forgets them for EVERY host of the deployment. "
        if prefix is not None:
            warning += (
                "Flushing one prefix makes the 64th part of its namespace unreachable there, or all of it if this "
                "daemon does not have the block in DRAM. "
            )
    if tier == "shared":
        return f"{warning}Forget {what} of {whose} in {where}?"
    return f"{warning}Forget {what} of {whose} in {where} ({held:,} blocks are held now)?"
