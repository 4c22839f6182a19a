"""The commands that look at a daemon and change nothing."""

from __future__ import annotations

from typing import Annotated

import typer

from tiercache.cli.command_line import LOOK, Address, Json, app, ending


@app.command(
    rich_help_panel=LOOK,
    epilog=ending("""\
  tiercache stats                     everything, as tables
  tiercache stats tiers namespaces    these sections alone
  tiercache stats --watch 5           one line every 5 seconds, with what changed
  tiercache stats --json | jq .arena.used_bytes
"""),
)
def stats(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION]...|SECONDS", help="Sections to show (default: all); or --watch's interval."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="One line per interval, until Ctrl-C.")] = False,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Show what the daemon holds, how often it is asked and how fast it answers.

    With --watch rates are per second; a line that begins with # tells of a daemon that is gone or back.
    """
    from tiercache.cli import stats as command

    wanted, interval_s = command.told(what or [], watch=watch)
    if interval_s is not None:
        return command.watch(address, interval_s=interval_s, as_json=as_json)
    return command.show(address, wanted=wanted, as_json=as_json)


@app.command(
    rich_help_panel=LOOK,
    epilog=ending(
        """\
  tiercache top                       live, until q
  tiercache top --interval 5 --sort idle
  tiercache top --once | head -20     one frame, for a pipe
""",
        "0 left with q, 1 no daemon answered at the start, 2 no terminal or a wrong command line",
    ),
)
def top(
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, max=3600, help="Between two looks (default: 1).")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, after one interval, and end.")] = False,
    sort: Annotated[
        str, typer.Option("--sort", metavar="asked|hits|blocks|idle", help="Order of the namespaces (default: asked).")
    ] = "asked",
    address: Address = None,
) -> int:
    """Watch the daemon on a terminal: tiers, hit rates, namespaces, hot prefixes, clients, queues, health.

    Keys: q leaves, p pauses, s sorts by another column, ? explains. It waits for a daemon that is restarted.
    """
    from tiercache.cli import top as command

    return command.run(address, interval_s=interval, once=once, sort=sort)


@app.command(
    rich_help_panel=LOOK,
    epilog=ending("""\
  tiercache ls                        whose blocks are here, and of what use they are
  tiercache ls --pins                 which prefixes are kept, and until when
  tiercache ls --json | jq '.[].fingerprint'
"""),
)
def ls(
    pins: Annotated[bool, typer.Option("--pins", help="List the pins instead.")] = False,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """List the namespaces of the daemon: engine, model, rank, blocks by tier, hits, last use, pins."""
    from tiercache.cli import ls as command

    return (command.pins if pins else command.namespaces)(address, as_json=as_json)


@app.command(
    rich_help_panel=LOOK,
    epilog=ending(
        """\
  tiercache inspect 00112233445566778899aabbccddeeff
                                      where that block is, and what keeps it there
  tiercache inspect --model ./Qwen3-0.6B --salt '' "$(cat prompt.txt)"
                                      how many tokens of a prompt are stored, by tier
""",
        "0 it is stored, 1 it is not or no daemon answers, 2 a wrong command line",
    ),
)
def inspect(
    what: Annotated[str, typer.Argument(metavar="KEY|TEXT", help="A block's key, 32 hex digits; or a prompt.")],
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME|DIR", help="Of the prompt TEXT; a folder tokenises it.")
    ] = None,
    salt: Annotated[
        str | None,
        typer.Option("--salt", metavar="SALT", envvar="TIERCACHE_SALT", help="The tenant's secret; '' for none."),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", metavar="ID", help="Look in one namespace (default: in all).")
    ] = None,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Show where a block is stored, or how much of a prompt. Changes nothing."""
    from tiercache.cli import inspect as command
    from tiercache.errors import ConfigError

    key = command.as_key(what)
    if key is not None and model is None:
        return command.block(address, key, namespace=namespace, as_json=as_json)
    if model is None:
        raise ConfigError(f"{what[:40]}: is no key (32 hex digits), and a prompt needs --model")
    from tiercache.cli import affinity as prompt

    return prompt.ask(address, model=model, text=what, tokens=None, salt=salt, lora="", cache_salt="", as_json=as_json)


@app.command(
    rich_help_panel=LOOK,
    epilog=ending(
        """\
  tiercache affinity --model ./Qwen3-0.6B --text "$(cat prompt.txt)" --salt ''
                                      of the daemon that runs here
  tiercache affinity --address http://10.0.0.7:8181 --model Qwen3-8B --tokens ids.json --salt s3
""",
        "0 something is stored, 1 nothing is or no daemon answers, 2 a wrong command line",
    ),
)
def affinity(
    model: Annotated[
        str, typer.Option("--model", metavar="NAME|DIR", help="The model, as the engine calls it, or its folder.")
    ],
    text: Annotated[
        str | None, typer.Option("--text", metavar="TEXT", help="The prompt, tokenised as --model does.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="FILE", help="The prompt as token ids, [1, 2, 3]; - is stdin.")
    ] = None,
    salt: Annotated[
        str | None,
        typer.Option("--salt", metavar="SALT", envvar="TIERCACHE_SALT", help="The tenant's secret; '' for none."),
    ] = None,
    lora: Annotated[str, typer.Option("--lora", metavar="NAME", help="A LoRA adapter.")] = "",
    cache_salt: Annotated[
        str, typer.Option("--cache-salt", metavar="SALT", help="`cache_salt` of a request to vLLM.")
    ] = "",
    as_json: Json = False,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="RUN_DIR|URL",
            help="The daemon's run directory or its HTTP port; for a tenant on another host tcp://HOST:PORT?key=FILE.",
        ),
    ] = None,
) -> int:
    """Show how many tokens of a prompt are stored, by tier. Changes nothing."""
    from tiercache.cli import affinity as command

    return command.ask(
        address, model=model, text=text, tokens=tokens, salt=salt, lora=lora, cache_salt=cache_salt, as_json=as_json
    )


@app.command(
    rich_help_panel=LOOK,
    epilog=ending(
        """\
  tiercache ping                      exit status 0 when the daemon answers
  tiercache ping --count 1000         with percentiles of the round trip
""",
        "0 it answers, 1 there is no daemon, 2 a wrong command line, 3 there is one and it does not answer",
    ),
)
def ping(
    count: Annotated[int, typer.Option("--count", metavar="N", min=1, max=1_000_000, help="How often.")] = 1,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Ask the daemon whether it is there and how long an answer takes."""
    from tiercache.cli import ping as command

    return command.ping(address, count=count, as_json=as_json)
