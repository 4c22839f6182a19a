"""`tiercache flush`: forget blocks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
                                      (in a windowed namespace only that block);
                                      with a shared store --namespace says of which
  tiercache flush --tier shared       forget what hosts share, for every host of the deployment
""",
)
def flush(
    tier: Annotated[str, typer.Option("--tier", metavar="all|dram|shared", help="Tiers to forget them in.")] = "all",
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace", metavar="ID", help="Number of a namespace, or the start of its fingerprint; may be repeated."
        ),
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
        whose = [find_namespace(stats, wanted) for wanted in namespace or ()]
        namespaces = list(dict.fromkeys(whose))
        if prefix is not None and not namespaces and has_shared and tier in ("all", "shared"):
            text = f"--prefix with a shared store needs --namespace, once or more: {known_namespaces(stats)}"
            raise ConfigError(f"{text}; or flush everything")
        if not yes:
            typer.confirm(question(stats, tier, namespace or [], prefix), abort=True, err=True)
        reply = client.call(Flush, timeout_s=FLUSH_DEADLINE_S, tier=tier, namespaces=namespaces, key=key)
    if not isinstance(reply, Flushed):
        raise ProtocolError(f"a flush was answered with {type(reply).__name__}")
    blocks, kept = reply.blocks, reply.kept
    if as_json:
        named = {"tier": tier, "namespaces": namespaces, "prefix": key.hex()}
        print_json({"flushed_blocks": blocks, **named, "shared_store_told": not kept if has_shared else None})
    else:
        print(outcome(blocks, tier, has_shared, kept, prefix is not None and (reply.more or "nvme" in stats["tiers"])))
    return EXIT_OK


def outcome(blocks: int, tier: str, has_shared: bool, kept: str = "", at_least: bool = False) -> str:
    """What was flushed. How many blocks a shared store had, no host knows.

    `at_least`: the daemon goes on counting what follows a block, and has answered before.
    """
    count = f"{'at least ' if at_least and blocks else ''}{blocks:,}"
    if kept:
        return f"{count} blocks flushed here; {kept}"
    if tier == "shared":
        return "flushed: no host finds these blocks in the shared store any more"
    if tier == "all" and has_shared:
        return f"{count} blocks flushed here, and no host finds them in the shared store any more"
    return f"{count} blocks flushed"


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
    raise ConfigError(f"--namespace = {wanted}: {problem}: {known_namespaces(stats)}")


def known_namespaces(stats: dict[str, Any]) -> str:
    """The namespaces that this daemon knows, in words."""
    known = [f"{int(row['id'])} ({row.get('fingerprint', '')})" for row in stats.get("namespaces", [])]
    return f"there are {', '.join(known)}" if known else "there are none yet on this host"


def question(stats: dict[str, Any], tier: str, namespace: Sequence[str], prefix: str | None) -> str:
    """The question that names what is about to be forgotten."""
    what = "all blocks"
    if prefix is not None:
        what = f"block {prefix[:8]}... and all that follow it (in a windowed namespace only that block)"
    whose = f"namespace {', '.join(namespace)}" if namespace else "every namespace"
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
