"""The commands that change what a daemon holds."""

from __future__ import annotations

from typing import Annotated

import typer

from tiercache.cli.command_line import CHANGE, Address, Json, app, ending


@app.command(
    rich_help_panel=CHANGE,
    epilog=ending("""\
  tiercache flush                     forget everything, after asking
  tiercache flush --yes --namespace 9f3a
                                      forget the blocks of one namespace (see `tiercache stats`)
  tiercache flush --yes --prefix 00112233445566778899aabbccddeeff
                                      forget one block and all that follow it
"""),
)
def flush(
    tier: Annotated[str, typer.Option("--tier", metavar="all|dram", help="Where to forget them.")] = "all",
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", metavar="ID", help="A namespace's number or (start of its) fingerprint."),
    ] = None,
    prefix: Annotated[
        str | None, typer.Option("--prefix", metavar="HEXKEY", help="Key of a block, 32 hex digits.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Forget blocks. Loads under way end as misses; requests only take longer."""
    from tiercache.cli import flush as command

    return command.flush(address, tier=tier, namespace=namespace, prefix=prefix, yes=yes, as_json=as_json)


@app.command(
    rich_help_panel=CHANGE,
    epilog=ending(
        """\
  tiercache pin 00112233445566778899aabbccddeeff --ttl 1d
                                      keep a system prompt for a day, by the key of its last block
  tiercache pin --model ./Qwen3-0.6B --salt '' "$(cat system-prompt.txt)"
                                      what is stored of a prompt
""",
        "0 all of it is kept, 1 not all or no daemon answers, 2 a wrong command line, or the block is nowhere",
    ),
)
def pin(
    what: Annotated[
        str, typer.Argument(metavar="KEY|TEXT", help="Key of the prefix's last block, 32 hex digits; or a prompt.")
    ],
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME|DIR", help="Of the prompt TEXT; a folder tokenises it.")
    ] = None,
    salt: Annotated[
        str | None,
        typer.Option("--salt", metavar="SALT", envvar="TIERCACHE_SALT", help="The tenant's secret; '' for none."),
    ] = None,
    ttl: Annotated[str, typer.Option("--ttl", metavar="DURATION", help="How long, at most 7d (default: 1h).")] = "1h",
    namespace: Annotated[
        str | None, typer.Option("--namespace", metavar="ID", help="One namespace (default: all that have the block).")
    ] = None,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Keep a prefix in DRAM, brought up from disks if need be: a block and all before it, or a prompt.

    Pins may hold --pin-share of the arena together, and end with the daemon. A second pin of a key replaces the first.
    """
    from tiercache.cli import pin as command

    return command.pin(address, what=what, model=model, salt=salt, namespace=namespace, ttl=ttl, as_json=as_json)


@app.command(
    rich_help_panel=CHANGE,
    epilog=ending(
        """\
  tiercache unpin 00112233445566778899aabbccddeeff
  tiercache unpin --all
""",
        "0 pins were ended, 1 there was none or no daemon answers, 2 a wrong command line",
    ),
)
def unpin(
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="That of `tiercache ls --pins`, 32 hex digits.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="End all pins, those of engines too.")] = False,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Let pinned prefixes be evicted again."""
    from tiercache.cli import pin as command

    return command.unpin(address, key=key, everything=everything, as_json=as_json)


@app.command(
    "set",
    rich_help_panel=CHANGE,
    epilog=ending(
        """\
  tiercache set log_level=debug       until the daemon reloads its settings or is restarted
  tiercache set quota='team-a=16GiB,*=1GiB'
  tiercache config --running          shows what was set by hand
""",
        "0 it was changed, 1 no daemon answers, 2 a wrong setting or value",
    ),
)
def set_(
    assignment: Annotated[str, typer.Argument(metavar="KEY=VALUE", help="log_level, quota or nvme_quota.")],
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Change a setting of a running daemon: log_level, quota or nvme_quota.

    It holds until the daemon reloads its settings (SIGHUP) or is restarted: to keep it write it into the file too.
    """
    from tiercache.cli import config as command

    return command.change(address, assignment, as_json=as_json)
