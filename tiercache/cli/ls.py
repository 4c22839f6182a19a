"""`tiercache ls`: the namespaces of a daemon, and what is pinned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiercache.cli.connection import connected
from tiercache.cli.declare import Address, Json, command
from tiercache.cli.exit_status import EXIT_OK
from tiercache.cli.report import Section, print_json, print_sections, with_human
from tiercache.ground.units import format_bytes, format_duration

if TYPE_CHECKING:
    from tiercache.client.client import Client

COLUMNS = (
    "id",
    "fingerprint",
    "tenant",
    "engine",
    "model",
    "rank",
    "block",
    "DRAM",
    "NVMe",
    "hit%",
    "last used",
    "pinned",
)


@command(
    "ls",
    """\
  tiercache ls                        whose blocks are here, and how many hits they get
  tiercache ls --pins                 which prefixes are pinned, and until when
  tiercache ls --json | jq '.[].fingerprint'
""",
)
def ls(
    pins: Annotated[bool, typer.Option("--pins", help="List the pins instead.")] = False,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """List the namespaces of the daemon: engine, model, rank, blocks by tier, hits, last use, pins."""
    return (_pins if pins else _namespaces)(address, as_json)


def _namespaces(address: str | None, as_json: bool) -> int:
    """Print every namespace: model, form, number and use of its blocks."""
    from tiercache.http.models import models_by_namespace
    from tiercache.protocol.messages import Models

    with connected(address) as client:
        tree = client.stats()
        models = client.session().call(Models).models
    named = models_by_namespace(models)
    rows = [{**row, "models": named.get(row["fingerprint"], [])} for row in tree.get("namespaces", [])]
    if as_json:
        print_json(with_human(rows))
    elif not rows:
        print("no namespaces yet: no engine has connected since the daemon was started")
    else:
        print_sections([Section("namespaces", COLUMNS, list(map(_row, rows)))])
    return EXIT_OK


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    asked = one.get("asked_blocks", 0)
    found = one.get("hit_blocks", 0) + one.get("hit_below_blocks", 0)
    size = int(one.get("block_bytes", 0))
    idle_s = one.get("idle_s")
    return (
        str(one["id"]),
        str(one["fingerprint"])[:12],
        one.get("tenant") or "-",
        str(one["engine"]),
        ", ".join(one["models"]) or "-",
        str(one["rank"]),
        f"{one['block_size']} tok {format_bytes(size)}",
        _held(one.get("blocks", 0), size),
        _held(one.get("below_blocks", 0), size),
        f"{found / asked:.0%}" if asked else "-",
        "not yet" if idle_s is None else f"{format_duration(idle_s)} ago",
        f"{one.get('pinned_blocks', 0):,}",
    )


def _held(blocks: int, block_bytes: int) -> str:
    return f"{blocks:,} ({format_bytes(blocks * block_bytes)})" if blocks else "0"


def _pins(address: str | None, as_json: bool) -> int:
    """Print the daemon's pins, in the order of their end, and their total limit."""
    with connected(address) as client:
        listed = pins_of(client)
    if as_json:
        print_json(listed)
        return EXIT_OK
    kept = sum(one["bytes"] for one in listed["pins"])
    limit = f"{format_bytes(kept)} of {format_bytes(listed['limit_bytes'])} that pins may keep (--pin-share)"
    rows = [
        (
            one["key"],
            ", ".join(map(str, one["namespaces"])),
            f"{one['blocks']:,}",
            format_bytes(one["bytes"]),
            format_duration(one["left_s"]),
        )
        for one in listed["pins"]
    ]
    sections = [Section("pins", ("", ""), [("count", f"{listed['count']:,}"), ("memory", limit)])]
    if rows:
        sections.append(Section("by key", ("last key", "namespaces", "blocks", "bytes", "ends in"), rows))
    print_sections(sections)
    return EXIT_OK


def pins_of(client: Client) -> dict[str, Any]:
    """The pins as a tree."""
    from tiercache.protocol.messages import Pins

    reply = client.session().call(Pins)
    return {
        "count": reply.count,
        "limit_bytes": reply.limit_bytes,
        "pins": [
            {
                "key": pin.key.hex(),
                "namespaces": pin.namespaces,
                "blocks": pin.blocks,
                "bytes": pin.held_bytes,
                "left_s": round(pin.left_ms / 1000, 1),
            }
            for pin in reply.pins
        ],
    }
