"""The commands that measure on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tiercache.cli.command_line import MEASURE, Json, app, ending
from tiercache.cli.exits import EXIT_USAGE
from tiercache.ground.extras import install_extra


@app.command(
    rich_help_panel=MEASURE,
    epilog=ending(
        """\
  tiercache demo                      a small random model and a prompt of 8192 tokens
  tiercache demo --model ./Qwen3-0.6B --prompt-file report.txt
  tiercache demo --engine vllm        the prompt in real vLLM
  tiercache demo --json               figures only, as one line of JSON
""",
        "0 all runs gave the same tokens, 1 they did not (a defect), 2 something is missing",
    ),
)
def demo(
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="DIR", help="Hugging Face model (default: a small random one)."),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", metavar="FILE", help="Text to start every prompt with.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", min=16, help="Length of the prompt.")] = 8192,
    engine: Annotated[
        str, typer.Option("--engine", metavar="tiercache|vllm", help="The bundled engine, or vLLM if it is installed.")
    ] = "tiercache",
    as_json: Json = False,
) -> int:
    """Serve one long prompt from scratch, from the cache, and while the daemon is dead; then conversations."""
    try:
        from tiercache.cli import demo as command

        return command.run(engine=engine, model=model, prompt_file=prompt_file, tokens=tokens, as_json=as_json)
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("torch", "transformers", "tokenizers", "safetensors"):
            raise
        print(f"tiercache: demo needs {error.name}: {install_extra('engine')}", file=sys.stderr)
        return EXIT_USAGE


bench_app = typer.Typer(
    help="Measure on this machine.",
    epilog=ending("""\
  tiercache bench codec               would a codec pay on these disks?
"""),
    rich_markup_mode=None,
)
app.add_typer(bench_app, name="bench", rich_help_panel=MEASURE)


@bench_app.command(
    "codec",
    rich_help_panel=MEASURE,
    epilog=ending("""\
  tiercache bench codec --dir /mnt/nvme0
                                      made-up bfloat16 blocks, against the disk of that directory
  tiercache bench codec --file kv.bin --block-bytes 2MiB --dtype float16
                                      blocks of yours
  tiercache bench codec --json
"""),
)
def bench_codec(
    files: Annotated[
        list[Path] | None,
        typer.Option("--file", metavar="FILE", help="Blocks, one behind the other (repeatable; default: made up)."),
    ] = None,
    block_bytes: Annotated[str, typer.Option("--block-bytes", metavar="SIZE", help="Length of one block.")] = "1MiB",
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

    return command.run(files=files or [], block_bytes=block_bytes, dtype=dtype, directory=directory, as_json=as_json)
