"""The commands: what they are called, take and explain. What they do is in the modules beside."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

import typer

from tiercache.cli.main import EXIT_OK, EXIT_USAGE

# ClickException, the base of all complaints about a command line. Newer typers carry a click of
# their own, older ones import it: by this way both are found.
_CommandLineError = cast("type[Exception]", typer.BadParameter.__mro__[2])

app = typer.Typer(
    name="tiercache",
    help="KV cache offloading for LLM serving: the daemon, and commands that look at it.",
    epilog="""\b
Examples:
  tiercache daemon --arena 16GiB      run the daemon in the foreground
  tiercache stats                     what it holds and how fast it answers
  tiercache COMMAND --help            more about a command
""",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

Address = Annotated[
    str | None,
    typer.Option("--address", metavar="DIR", help="Run directory of the daemon ($TIERCACHE_RUN_DIR)."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, with raw numbers.")]


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status. Raises the errors of `tiercache.errors`."""
    try:
        status = app(list(arguments) or ["--help"], prog_name="tiercache", standalone_mode=False)
    except _CommandLineError as error:
        print(f"tiercache: {_one_line(error)}: see `tiercache --help`", file=sys.stderr)
        return EXIT_USAGE
    except (typer.Abort, KeyboardInterrupt):
        print("tiercache: stopped", file=sys.stderr)
        return EXIT_USAGE
    except SystemExit:
        return EXIT_OK  # click's answer to a closed pipe (`| head`): the reader has seen enough
    return status if isinstance(status, int) else EXIT_OK


def _one_line(error: BaseException) -> str:
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    return " ".join(text.split()).rstrip(".")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def daemon(context: typer.Context) -> int:
    """Run the daemon in the foreground until SIGTERM."""
    from tiercache.cli.main import main

    return main(["daemon", *context.args])


@app.command(epilog="""\b
Examples:
  tiercache stats                     everything, as tables
  tiercache stats --watch 5           one line every 5 seconds, with what changed
  tiercache stats --json | jq .arena.used_bytes
""")
def stats(
    seconds: Annotated[
        float | None, typer.Argument(metavar="SECONDS", help="Interval of --watch (default: 1).", min=0.01)
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="One line per interval, until Ctrl-C.")] = False,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Show what the daemon holds, how often it is asked and how fast it answers."""
    from tiercache.cli import stats as command

    if watch or seconds is not None:
        return command.watch(address, interval_s=seconds or 1.0, as_json=as_json)
    return command.show(address, as_json=as_json)


@app.command(epilog="""\b
Examples:
  tiercache flush                     forget everything, after asking
  tiercache flush --yes --namespace 9f3a
                                      forget the blocks of one namespace (see `tiercache stats`)
  tiercache flush --yes --prefix 00112233445566778899aabbccddeeff
                                      forget one block and all that follow it
""")
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


@app.command(epilog="""\b
Examples:
  tiercache ping                      exit status 0 when the daemon answers, else 1
  tiercache ping --count 1000         with percentiles of the round trip
""")
def ping(
    count: Annotated[int, typer.Option("--count", metavar="N", min=1, max=1_000_000, help="How often.")] = 1,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Ask the daemon whether it is there and how long an answer takes."""
    from tiercache.cli import ping as command

    return command.ping(address, count=count, as_json=as_json)


@app.command(epilog="""\b
Examples:
  tiercache check                     the running daemon, or the nvme directories of the configuration
  tiercache check --nvme /mnt/nvme0/kv --full --rate 1GiB
                                      a directory that no daemon uses, every block
  tiercache check --nvme /mnt/nvme0/kv --repair
                                      also delete what is wrong there
  tiercache check --address /run/tiercache --sample 0
                                      the books of a running daemon only
""")
def check(
    nvme: Annotated[
        list[str] | None,
        typer.Option("--nvme", metavar="DIR", help="Directory that no daemon uses (may be repeated)."),
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Delete wrong rows and what follows them (without a daemon only).")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Read every block, not a sample.")] = False,
    sample: Annotated[
        int | None, typer.Option("--sample", metavar="N", min=0, help="Blocks to read, at random (default: 1000).")
    ] = None,
    rate: Annotated[
        str, typer.Option("--rate", metavar="SIZE", help="Bytes a second to read blocks at; 0: no limit.")
    ] = "200MiB",
    force: Annotated[
        bool, typer.Option("--force", help="Check a running daemon of any size; it serves nobody meanwhile.")
    ] = False,
    path: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="TOML file (default: $TIERCACHE_CONFIG).")
    ] = None,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Look for faults: in nvme directories, or in a daemon that runs.

    Exit status: 0 when there is none, 1 when there is one (repaired or not), 2 when it could not be checked.
    """
    from tiercache.cli import check as command

    return command.check(
        command.Options(
            nvme=tuple(nvme or ()), repair=repair, full=full, sample=sample, rate=rate, force=force,
            config=path, as_json=as_json, address=address,
        )
    )  # fmt: skip


@app.command(epilog="""\b
Examples:
  tiercache config > tiercache.toml   a file to start from: every setting, explained
  TIERCACHE_ARENA=16GiB tiercache config
                                      says where each value that was chosen came from
""")
def config(
    path: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="TOML file (default: $TIERCACHE_CONFIG).")
    ] = None,
    as_json: Json = False,
) -> int:
    """Print the settings that a daemon started here would have."""
    from tiercache.cli import config as command

    return command.show(path, as_json=as_json)


@app.command(epilog="""\b
Examples:
  tiercache demo                      a small random model and a prompt of 8192 tokens
  tiercache demo --model ./Qwen3-0.6B --prompt-file report.txt
  tiercache demo --engine vllm        the prompt in real vLLM
  tiercache demo --json               figures only
""")
def demo(
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="DIR", help="Hugging Face model (default: a small random one)."),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", metavar="FILE", help="Text to start every prompt with.")
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=16, help="Length of the prompt.")
    ] = 8192,
    engine: Annotated[
        str, typer.Option("--engine", metavar="tiercache|vllm", help="The bundled engine, or vLLM if it is installed.")
    ] = "tiercache",
    as_json: Json = False,
) -> int:
    """Serve one long prompt from scratch, from the cache, and while the daemon is dead; then conversations."""
    try:
        from tiercache.cli import demo as command

        return command.run(
            engine=engine, model=model, prompt_file=prompt_file, tokens=tokens, as_json=as_json
        )
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("torch", "transformers", "tokenizers", "safetensors"):
            raise
        print(f"tiercache: demo needs {error.name}: pip install 'tiercache[engine]'", file=sys.stderr)
        return EXIT_USAGE


@app.command(epilog="""\b
Examples:
  tiercache affinity --model ./Qwen3-0.6B --text "$(cat prompt.txt)" --salt ''
                                      of the daemon that runs here; exit status 1 when nothing is stored
  tiercache affinity http://10.0.0.7:8181 --model Qwen/Qwen3-8B --tokens prompt.json --salt s3cret --json
""")
def affinity(
    model: Annotated[
        str, typer.Option("--model", metavar="NAME|DIR", help="The model, as the engine calls it, or its folder.")
    ],
    target: Annotated[
        str | None,
        typer.Argument(metavar="[RUN_DIR|URL]", help="The daemon's run directory, or its HTTP port."),
    ] = None,
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
) -> int:
    """Show how many tokens of a prompt are stored, by tier. Changes nothing."""
    from tiercache.cli import affinity as command

    return command.ask(
        target, model=model, text=text, tokens=tokens, salt=salt, lora=lora, cache_salt=cache_salt, as_json=as_json
    )


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def http(context: typer.Context) -> int:
    """Serve health, metrics, statistics and the affinity query of a daemon over HTTP."""
    from tiercache.http.__main__ import main as command

    return command(context.args)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def serve(context: typer.Context) -> int:
    """Serve a model over HTTP, with an interface like OpenAI's."""
    # Both are read when torch and transformers are loaded. Threads of torch that wait must not spin: the daemon
    # and the event loop need the cores too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        from tiercache.cli import serve as command
    except ImportError as error:
        print(f"tiercache: serve needs {error.name}: pip install 'tiercache[engine,serve]'", file=sys.stderr)
        return EXIT_USAGE
    return command.main(context.args)


bench_app = typer.Typer(
    help="Measure on this machine.",
    epilog="""\b
Examples:
  tiercache bench codec               would a codec pay on these disks?
""",
    rich_markup_mode=None,
)
app.add_typer(bench_app, name="bench")


@bench_app.command("codec", epilog="""\b
Examples:
  tiercache bench codec --dir /mnt/nvme0
                                      made-up bfloat16 blocks, against the disk of that directory
  tiercache bench codec --file kv.bin --block-bytes 2MiB --dtype float16
                                      blocks of yours
  tiercache bench codec --json
""")
def bench_codec(
    files: Annotated[
        list[Path] | None,
        typer.Option("--file", metavar="FILE", help="Blocks, one behind the other (repeatable; default: made up)."),
    ] = None,
    block_bytes: Annotated[
        str, typer.Option("--block-bytes", metavar="SIZE", help="Length of one block.")
    ] = "1MiB",
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="NAME", help="Element type, as torch names it.")
    ] = "bfloat16",
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Measure its disk too: 256 MiB are written, read and removed."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Show what codecs save on KV blocks, what they cost, and on which disks that pays."""
    from tiercache.cli import bench_codec as command

    return command.run(
        files=files or [], block_bytes=block_bytes, dtype=dtype, directory=directory, as_json=as_json
    )


@app.command(epilog="""\b
Examples:
  tiercache doctor --gds /mnt/nvme0/tiercache
                                      can blocks go from that disk to a GPU directly, and is it faster
  tiercache doctor --gds . --json | jq .gds.mode
""")
def doctor(
    gds: Annotated[
        Path,
        typer.Option(
            "--gds", metavar="DIR", help="A directory on the disk in question; 64 MiB are written there and removed."
        ),
    ],
    as_json: Json = False,
) -> int:
    """Examine the machine: so far only GPUDirect Storage on a directory. Takes up to 2 minutes."""
    from tiercache.cli import doctor as command

    return command.gds(gds, as_json=as_json)


@app.command(epilog="""\b
Examples:
  tiercache version
""")
def version(as_json: Json = False) -> int:
    """Print the versions of tiercache and of what it runs on."""
    from tiercache.cli import config as command

    return command.version(as_json=as_json)
