"""`tiercache pin` and `unpin`: keep a prefix from eviction, by the key of its last block."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tiercache.cli.connection import connected
from tiercache.cli.declare import SILENT, Address, Json, PromptModel, Salt, command
from tiercache.cli.exit_status import EXIT_OK, EXIT_UNWELL
from tiercache.cli.flush import find_namespace
from tiercache.cli.inspect import as_key
from tiercache.cli.ls import pins_of
from tiercache.cli.report import print_json
from tiercache.errors import ConfigError
from tiercache.ground.units import format_duration, parse_duration_s
from tiercache.protocol.messages import KEY_BYTES, MAX_PIN_TTL_MS

if TYPE_CHECKING:
    from tiercache.client.client import Client

LOAD_S = 30.0
"""How long the promotion of blocks that are only on disks may take."""
_POLL_S = 0.02


class _Prefix(NamedTuple):
    """A prefix and the namespaces that have its last block."""

    keys: bytes
    namespaces: list[int]

    @property
    def blocks(self) -> int:
        return len(self.keys) // KEY_BYTES


@command(
    "pin",
    """\
  tiercache pin 00112233445566778899aabbccddeeff --ttl 1d
                                      keep a system prompt for a day, by the key of its last block
  tiercache pin --model ./Qwen3-0.6B --salt '' "$(cat system-prompt.txt)"
                                      what is stored of a prompt
""",
    f"0 all of it is kept, 1 not all is, or no daemon runs, 2 a wrong command line, or it is not stored, {SILENT}",
)
def pin(
    what: Annotated[
        str, typer.Argument(metavar="KEY|TEXT", help="Key of the prefix's last block, 32 hex digits; or a prompt.")
    ],
    model: PromptModel = None,
    salt: Salt = None,
    ttl: Annotated[
        str, typer.Option("--ttl", metavar="DURATION", help="How long to keep it, at most 7d (default: 1h).")
    ] = "1h",
    namespace: Annotated[
        str | None, typer.Option("--namespace", metavar="ID", help="One namespace (default: all that have the block).")
    ] = None,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Keep a prefix in DRAM, loaded from disk if necessary: a block and all before it, or a prompt.

    Pins may hold --pin-share of the arena together, and end with the daemon. A second pin of a key replaces the first.
    """
    ttl_s = _parse_ttl(ttl)
    with connected(address) as client:
        if model is not None:
            prefix = _of_prompt(client, what, model, salt)
        else:
            prefix = _find(client, _parse_key(what, "and a prompt needs --model"), namespace)
        loaded = _load(client, prefix)
        reply = _pin(client, prefix, ttl_s)
        limit = pins_of(client)["limit_bytes"]
    whole = reply == prefix.blocks
    if as_json:
        print_json(
            {
                "key": prefix.keys[-KEY_BYTES:].hex(),
                "namespaces": prefix.namespaces,
                "pinned_blocks": reply,
                "blocks": prefix.blocks,
                "ttl_s": ttl_s,
                "limit_bytes": limit,
            }
        )
        return EXIT_OK if whole else EXIT_UNWELL
    print(f"{reply:,} of {prefix.blocks:,} blocks pinned for {format_duration(ttl_s)}")
    if not whole and loaded < prefix.blocks:
        print(f"{prefix.blocks - loaded:,} blocks were not loaded from disk within {LOAD_S:.0f} s: try again")
    elif not whole:
        print("the rest exceeds what pins may keep: see `tiercache ls --pins`, and --pin-share of the daemon")
    return EXIT_OK if whole else EXIT_UNWELL


@command(
    "unpin",
    """\
  tiercache unpin 00112233445566778899aabbccddeeff
  tiercache unpin --all
""",
    f"0 pins were ended, 1 there was none, or no daemon runs, 2 a wrong command line, {SILENT}",
)
def unpin(
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="A key that `tiercache ls --pins` shows, 32 hex digits.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="End all pins, those of engines too.")] = False,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Let pinned prefixes be evicted again."""
    from tiercache.protocol.messages import Unpin

    if (key is None) == (not everything):
        raise ConfigError("give either the KEY that a pin was set with (`tiercache ls --pins`), or --all")
    wanted = None if key is None else _parse_key(key).hex()
    with connected(address) as client:
        ended = [one for one in pins_of(client)["pins"] if wanted in (None, one["key"])]
        blocks = 0
        for one in ended:
            keys = bytes.fromhex(one["key"])
            blocks += client.session().call(Unpin, namespaces=one["namespaces"], keys=keys).blocks
    if as_json:
        print_json({"ended_pins": len(ended), "unpinned_blocks": blocks})
    else:
        what = "1 pin" if len(ended) == 1 else f"{len(ended):,} pins"
        nothing = "nothing is pinned" + (" by that key: see `tiercache ls --pins`" if key else "")
        print(f"{what} ended, {blocks:,} blocks may be evicted again" if ended else nothing)
    return EXIT_OK if ended else EXIT_UNWELL


def _parse_key(text: str, otherwise: str = "see `tiercache ls --pins`") -> bytes:
    key = as_key(text)
    if key is None:
        raise ConfigError(f"{text[:40]}: is not a key of a block ({2 * KEY_BYTES} hex digits), {otherwise}")
    return key


def _parse_ttl(text: str) -> float:
    try:
        ttl_s = parse_duration_s(text)
    except ValueError as error:
        raise ConfigError(f"--ttl = {text}: {error}") from None
    if not 0 < ttl_s <= MAX_PIN_TTL_MS / 1000:
        raise ConfigError(f"--ttl = {text}: must be more than 0, and at most 7d")
    return ttl_s


def _find(client: Client, key: bytes, namespace: str | None) -> _Prefix:
    """The chain that ends with the key, in the namespaces that have its last block."""
    from tiercache.protocol.messages import Inspect

    numbers = [] if namespace is None else [find_namespace(client.stats(), namespace)]
    reply = client.session().call(Inspect, namespaces=numbers, key=key, chain=True)
    if not reply.chain:
        raise ConfigError(f"block {key.hex()} is in no tier, or part of no chain: `tiercache inspect` says where it is")
    return _Prefix(reply.chain, sorted({view.namespace for view in reply.blocks}))


def _of_prompt(client: Client, text: str, model: str, salt: str | None) -> _Prefix:
    """The stored part of a prompt, in all ranks and groups of the model that has most of it."""
    from tiercache.cli.affinity import tokenise
    from tiercache.http.block_names import BlockNames
    from tiercache.http.query import Query, is_meant
    from tiercache.protocol.messages import Models, Peek

    if salt is None:
        raise ConfigError("--salt is missing: give that of the tenant, or --salt '' where the engines have none")
    name = Path(model).resolve().name if Path(model).is_dir() else model
    tokens = tokenise(model, text)
    query = Query(model=name, tokens=tokens, salt=salt)
    listed, best = client.session().call(Models), _Prefix(b"", [])
    for card in listed.models:
        keys = BlockNames(card, query).keys(tokens) if is_meant(card, query) else b""
        numbers = [listed.namespaces[one] for one in card.namespaces if one in listed.namespaces]
        if keys and len(numbers) == len(card.namespaces):
            peeked = client.session().call(Peek, namespaces=numbers, keys=keys)
            found = _Prefix(keys[: (peeked.dram_blocks + peeked.below_blocks) * KEY_BYTES], numbers)
            best = max(best, found, key=lambda prefix: prefix.blocks)
    if not best.blocks:
        text = f"nothing is stored of this prompt for {name}: `tiercache affinity` shows what is asked for"
        raise ConfigError(text)
    return best


def _load(client: Client, prefix: _Prefix) -> int:
    """Promote the prefix to DRAM, as far as possible within LOAD_S; returns the number of blocks there."""
    from tiercache.protocol.messages import Peek, Prefetch

    def here() -> Any:
        return client.session().call(Peek, namespaces=prefix.namespaces, keys=prefix.keys)

    until_s, peeked = time.monotonic() + LOAD_S, here()
    if peeked.below_blocks:
        client.session().call(Prefetch, namespaces=prefix.namespaces, keys=prefix.keys)
    while peeked.below_blocks and time.monotonic() < until_s:
        time.sleep(_POLL_S)
        peeked = here()
    return int(peeked.dram_blocks)


def _pin(client: Client, prefix: _Prefix, ttl_s: float) -> int:
    from tiercache.protocol.messages import Pin

    ttl_ms = max(1, int(ttl_s * 1000))
    reply = client.session().call(Pin, namespaces=prefix.namespaces, keys=prefix.keys, ttl_ms=ttl_ms)
    return reply.blocks
