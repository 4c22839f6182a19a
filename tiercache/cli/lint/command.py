"""`tiercache lint`: what breaks the prefixes of prompts, before the cache finds nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from tiercache.cli.declare import Json, command
from tiercache.cli.exit_status import EXIT_OK, EXIT_UNWELL
from tiercache.cli.lint.compare import lint as find_all
from tiercache.cli.lint.findings import SHORT_CHARS, Ruler
from tiercache.cli.lint.prompts import (
    MAX_ALL_CHARS,
    MAX_CHARS,
    MAX_PROMPTS,
    STDIN,
    LintedPrompt,
    read_file,
    read_prompts,
)
from tiercache.cli.report import print_json, printable
from tiercache.errors import ConfigError, ModelRefused
from tiercache.ground.extras import install_extra

MAX_FINDINGS = 100


@command(
    "lint",
    """\
  tiercache lint system.txt prompt1.txt prompt2.txt
                                      texts, one prompt a file
  tiercache lint requests.jsonl --model ./Qwen3-0.6B
                                      requests in OpenAI's form; counts tokens and blocks
  cat request.json | tiercache lint - --json
""",
    "0 nothing was found, 1 something was, 2 a wrong command line or file",
)
def lint(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="PROMPT...", help="Files: a text, a request in JSON, or one request a line; - is stdin."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="DIR", help="Count in tokens of this model's tokenizer (default: characters)."),
    ] = None,
    block_size: Annotated[
        int, typer.Option("--block-size", metavar="N", min=1, help="Tokens in a block of the engine, with --model.")
    ] = 16,
    as_json: Json = False,
) -> int:
    """Find what keeps prompts from being reused: times and ids at the front, tools or documents in changing order.

    Compares each prompt with those before it, so give prompts of one application. Asks no daemon.
    """
    if files.count(STDIN) > 1:
        raise ConfigError("- can be given once")
    prompts, notes = _bounded([prompt for path in files for prompt in _read(path)])
    short = sum(len(prompt.text) < SHORT_CHARS for prompt in prompts)
    if short:
        notes.append(
            f"{short:,} of {len(prompts):,} prompts have fewer than {SHORT_CHARS} characters: too short to be judged, "
            "since a cache reuses whole blocks of tokens; give the prompts as the engine gets them"
        )
    ruler = Ruler(_tokeniser(model) if model is not None else None, block_size)
    found = find_all(prompts)
    if len(found) > MAX_FINDINGS:
        notes.append(f"only the first {MAX_FINDINGS} of {len(found)} findings are shown")
        found = found[:MAX_FINDINGS]
    for note in notes:
        print(f"tiercache: {note}", file=sys.stderr)
    if as_json:
        print_json({"prompts": len(prompts), "findings": [ruler.tree(one) for one in found], "notes": notes})
    elif not found:
        judged = len(prompts) - short
        named = f"{judged:,} {'prompt' if judged == 1 else 'prompts'}"
        print(f"{named}: nothing found that costs a tenth of one" if judged else "no prompt could be judged")
    else:
        for one in found:
            print(ruler.line(one))
    return EXIT_UNWELL if found else EXIT_OK


def _read(path: str) -> list[LintedPrompt]:
    return read_prompts("stdin" if path == STDIN else path, read_file(path))


def _bounded(prompts: list[LintedPrompt]) -> tuple[list[LintedPrompt], list[str]]:
    """As many of the prompts as are looked at, and a line about what is left out."""
    notes, kept, chars = [], [], 0
    for prompt in prompts[:MAX_PROMPTS]:
        chars += len(prompt.text)
        if chars > MAX_ALL_CHARS:
            break
        kept.append(prompt)
    if len(kept) < len(prompts):
        most = f"{MAX_PROMPTS:,} prompts and {MAX_ALL_CHARS >> 20} Mi characters"
        notes.append(f"only the first {len(kept):,} of {len(prompts):,} prompts are looked at: at most {most}")
    if cut := [prompt.source for prompt in kept if len(prompt.text) >= MAX_CHARS]:
        notes.append(printable(f"{cut[0]}: only the first {MAX_CHARS:,} characters of a prompt are looked at"))
    return kept, notes


def _tokeniser(model: str) -> Callable[[str], list[int]]:
    from tiercache.engine.prompts import load_tokenizer

    try:
        tokenizer = load_tokenizer(model)
    except ImportError as error:
        raise ConfigError(f"--model needs {error.name}: {install_extra('engine')}, or leave it out") from None
    except ModelRefused as error:
        raise ConfigError(f"--model {error}; or leave it out") from error
    return lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])
