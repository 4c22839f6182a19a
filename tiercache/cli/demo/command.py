"""`tiercache demo`: the cache at work on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tiercache.cli.declare import Json, command
from tiercache.cli.exit_status import EXIT_USAGE
from tiercache.ground.extras import install_extra


@command(
    "demo",
    """\
  tiercache demo                      a small random model and a prompt of 8192 tokens
  tiercache demo --model ./Qwen3-0.6B --prompt-file report.txt
  tiercache demo --engine vllm        the prompt in real vLLM
  tiercache demo --hosts 2            two hosts that share a Valkey, which is killed in between
  tiercache demo --json               figures only, as one line of JSON
""",
    "0 all runs gave the same tokens, 1 they did not (a defect), 2 a package or a file is missing",
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
    hosts: Annotated[
        int, typer.Option("--hosts", metavar="1|2", help="2: two daemons that share a Valkey server, as two hosts.")
    ] = 1,
    as_json: Json = False,
) -> int:
    """Serve one long prompt from scratch, from the cache, and while the daemon is dead; then conversations.

    With --hosts 2: serve it on a second host from what the first one has computed, then without the store.
    """
    try:
        from tiercache.cli.demo.show import show

        return show(engine=engine, model=model, prompt_file=prompt_file, tokens=tokens, as_json=as_json, hosts=hosts)
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("torch", "transformers", "tokenizers", "safetensors"):
            raise
        print(f"tiercache: demo needs {error.name}: {install_extra('engine')}", file=sys.stderr)
        return EXIT_USAGE
