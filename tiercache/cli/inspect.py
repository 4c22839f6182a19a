"""`tiercache inspect`: where a block is and what keeps it there, or how much of a prompt is stored."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tiercache.cli.connection import connected
from tiercache.cli.declare import SILENT, Address, Json, PromptModel, Salt, command
from tiercache.cli.exit_status import EXIT_OK, EXIT_UNWELL
from tiercache.cli.flush import find_namespace
from tiercache.cli.report import Section, print_json, print_sections, with_human
from tiercache.errors import ConfigError
from tiercache.ground.units import format_bytes, format_duration
from tiercache.protocol.messages import KEY_BYTES

COLUMNS = ("namespace", "engine", "rank", "tier", "bytes", "used", "children", "kept by", "codec", "checksum", "place")


@command(
    "inspect",
    """\
  tiercache inspect 00112233445566778899aabbccddeeff
                                      where that block is, and what keeps it there
  tiercache inspect --model ./Qwen3-0.6B --salt '' "$(cat prompt.txt)"
                                      how many tokens of a prompt are stored, by tier
""",
    f"0 it is stored, 1 it is not, or no daemon runs, 2 a wrong command line, {SILENT}",
)
def inspect(
    what: Annotated[str, typer.Argument(metavar="KEY|TEXT", help="A block's key, 32 hex digits; or a prompt.")],
    model: PromptModel = None,
    salt: Salt = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", metavar="ID", help="Look in one namespace (default: in all).")
    ] = None,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Show where a block is stored, or how much of a prompt. Changes nothing."""
    if model is not None:
        from tiercache.cli.affinity import affinity

        return affinity(model, text=what, salt=salt, as_json=as_json, address=address)
    key = as_key(what)
    if key is None:
        raise ConfigError(f"{what[:40]}: is not a key (32 hex digits), and a prompt needs --model")
    return block(address, key, namespace=namespace, as_json=as_json)


def as_key(text: str) -> bytes | None:
    """The key from a text of 32 hex digits; None for any other text."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES and len(text) == 2 * KEY_BYTES else None


def block(address: str | None, key: bytes, *, namespace: str | None, as_json: bool) -> int:
    """Print every place of a block. Exit status 1: it is nowhere."""
    from tiercache.protocol.messages import Inspect

    with connected(address) as client:
        tree = client.stats()
        numbers = [] if namespace is None else [find_namespace(tree, namespace)]
        reply = client.session().call(Inspect, namespaces=numbers, key=key)
    spaces = {one["id"]: one for one in tree.get("namespaces", [])}
    places = [
        {
            "namespace": view.namespace,
            "fingerprint": spaces.get(view.namespace, {}).get("fingerprint", ""),
            "engine": spaces.get(view.namespace, {}).get("engine", ""),
            "rank": spaces.get(view.namespace, {}).get("rank", ""),
            "tier": view.tier,
            "place": view.place,
            "stored_bytes": view.stored_bytes,
            "idle_s": view.idle_s,
            "children": view.children,
            "pins": view.pins,
            "codec": view.codec,
            "checksum": view.checksum,
        }
        for view in reply.blocks
    ]
    found = {"key": key.hex(), "found": bool(places), "depth": reply.depth, "places": places}
    if as_json:
        print_json(with_human(found))
    elif not places:
        whose = "of no namespace" if namespace is None else f"not of namespace {namespace}"
        print(f"block {key.hex()} is in no tier, {whose}")
    else:
        where = f"block {reply.depth} of its chain" if reply.depth else "of a window, which has no chain"
        print_sections(
            [
                Section("block", ("", ""), [("key", key.hex()), ("place", where)]),
                Section("copies", COLUMNS, list(map(_row, places))),
            ]
        )
    return EXIT_OK if places else EXIT_UNWELL


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    used = "-" if one["idle_s"] is None else f"{format_duration(one['idle_s'])} ago"
    kept = "nothing" if not one["pins"] else f"{one['pins']} leases or pins"
    return (
        str(one["namespace"]),
        str(one["engine"]),
        str(one["rank"]),
        one["tier"],
        format_bytes(one["stored_bytes"]),
        used,
        str(one["children"]),
        kept,
        one["codec"] or "-",
        one["checksum"] or "-",
        one["place"] or "-",
    )
