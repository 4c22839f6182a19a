"""`tiercache affinity`: how many tokens of a prompt are stored, and where."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiercache.cli.connection import connected
from tiercache.cli.declare import SILENT, Json, Salt, command
from tiercache.cli.exit_status import EXIT_OK, EXIT_UNWELL
from tiercache.cli.report import Section, print_json, print_sections
from tiercache.errors import ConfigError, DaemonUnavailable, ModelRefused, RequestRefused
from tiercache.ground.extras import install_extra

if TYPE_CHECKING:
    from urllib.error import HTTPError

TIMEOUT_S = 10.0


@command(
    "affinity",
    """\
  tiercache affinity --model ./Qwen3-0.6B --text "$(cat prompt.txt)" --salt ''
                                      asks the daemon of this host
  tiercache affinity --address http://10.0.0.7:8181 --model Qwen3-8B --tokens ids.json --salt s3
  tiercache affinity --model Qwen3-8B --segments parts.json --salt ''
                                      the order of the parts in which most is stored
""",
    f"0 something is stored, 1 nothing is, or no daemon runs, 2 a wrong command line, {SILENT}",
)
def affinity(
    model: Annotated[
        str, typer.Option("--model", metavar="NAME|DIR", help="The model, as the engine calls it, or its folder.")
    ],
    text: Annotated[
        str | None,
        typer.Option("--text", metavar="TEXT", help="The prompt; the tokenizer of --model turns it into ids."),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="FILE", help="The prompt as token ids, [1, 2, 3]; - is stdin.")
    ] = None,
    segments: Annotated[
        str | None,
        typer.Option(
            "--segments",
            metavar="FILE",
            help='The prompt in parts, [[1, 2], {"unordered": [[3], [4, 5]]}]: token ids, and groups of '
            "documents that may come in any order; - is stdin.",
        ),
    ] = None,
    salt: Salt = None,
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
    """Show how many tokens of a prompt are stored, by tier. Changes nothing.

    With --segments also the order of the documents with the longest stored beginning: send the prompt in that order.
    """
    if [text, tokens, segments].count(None) != 2:
        raise ConfigError("give either --text, --tokens or --segments")
    if salt is None:
        raise ConfigError("--salt is missing: give that of the tenant, or --salt '' where the engines have none")
    fields: dict[str, Any] = {"model": model, "salt": salt, "lora": lora, "cache_salt": cache_salt}
    if segments is not None:
        fields["segments"] = _read_segments(segments)
    else:
        fields["tokens"] = _read_tokens(tokens) if tokens is not None else tokenise(model, text or "")
    if Path(model).is_dir():
        fields["model"] = Path(model).resolve().name
    by_http = address is not None and address.startswith(("http://", "https://"))
    answer = _ask_url(str(address), fields) if by_http else _ask_daemon(address, fields)
    if as_json:
        print_json(answer)
    else:
        print_sections(_sections(answer))
    return EXIT_OK if answer["matched"] else EXIT_UNWELL


def _read_tokens(path: str) -> list[int]:
    """Token ids from a file (`-`: stdin): a JSON array, or numbers separated by spaces or commas."""
    try:
        text = _read("--tokens", path)
        return [int(part) for part in text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()]
    except ValueError:
        raise ConfigError(f"--tokens {path} has no list of token ids: write them as [1, 2, 3]") from None


def _read_segments(path: str) -> Any:
    """A prompt in parts from a file (`-`: stdin), as the body of a query has it. What it must be, the query checks."""
    try:
        return json.loads(_read("--segments", path))
    except (ValueError, RecursionError):
        known = 'write [[1, 2], {"unordered": [[3], [4, 5]]}]'
        raise ConfigError(f"--segments {path} has no JSON of a prompt in parts: {known}") from None


def _read(option: str, path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be read: {error.strerror}") from None


def tokenise(model: str, text: str) -> list[int]:
    """Token ids of a text as engines make them, with the model's special tokens at its beginning."""
    from tiercache.engine.prompts import load_tokenizer

    try:
        tokenizer = load_tokenizer(model)
    except ImportError as error:
        needs = f"--text needs {error.name}: {install_extra('engine')}, or give --tokens"
        raise ConfigError(needs) from None
    except ModelRefused as error:
        raise ConfigError(f"--model {error}; or give --tokens") from error
    return [int(token) for token in tokenizer(text)["input_ids"]]


def _ask_daemon(address: str | None, fields: dict[str, Any]) -> dict[str, Any]:
    import msgspec

    from tiercache.http.affinity import Affinity, Query

    try:
        query = msgspec.convert(fields, Query)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None
    with connected(address) as client:
        return Affinity(client).ask(query)


def _ask_url(url: str, fields: dict[str, Any]) -> dict[str, Any]:
    import urllib.error
    import urllib.request

    where = url.rstrip("/").removesuffix("/v1/affinity") + "/v1/affinity"
    request = urllib.request.Request(where, json.dumps(fields).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            answer: dict[str, Any] = json.loads(reply.read())
            return answer
    except urllib.error.HTTPError as error:
        raise _refusal(error) from None
    except (OSError, ValueError) as error:
        raise DaemonUnavailable(f"{where} does not answer: {error}") from None


def _refusal(error: HTTPError) -> RequestRefused:
    try:
        said = json.loads(error.read())["error"]
        return RequestRefused(str(said["code"]), str(said["message"]))
    except (OSError, ValueError, KeyError, TypeError):
        return RequestRefused(f"http {error.code}", str(error.reason))


_TIERS = {"dram": "DRAM", "nvme": "NVMe", "shared": "shared store"}


def _sections(answer: dict[str, Any]) -> list[Section]:
    tiers = answer["matched_tokens"]
    total = answer["tokens"]
    share = f" ({answer['matched'] / total:.1%})" if total else ""
    summary = Section(
        "affinity",
        ("", "tokens"),
        [
            ("prompt", f"{total:,}"),
            ("stored", f"{answer['matched']:,}{share}"),
            *((_TIERS.get(tier, tier), f"{count:,}") for tier, count in tiers.items()),
        ],
    )
    order = []
    if "order" in answer:
        rest = "" if answer["complete"] else " (the search ended at its limits: there may be a better one)"
        order = [
            Section(
                "order with the longest stored prefix" + rest,
                ("", ""),
                [
                    ("stored in the order given", f"{answer['matched_as_given']:,}"),
                    *((f"group {number}", " ".join(map(str, one))) for number, one in enumerate(answer["order"])),
                ],
            )
        ]
    rows = [
        (
            chain["names"][0] if chain["names"] else "",
            chain["adapter"] or "-",
            chain["hashing"],
            f"{chain['block_size']}",
            space["fingerprint"][:8],
            *(f"{space[tier]:,}" for tier in tiers),
        )
        for chain in answer["chains"]
        for space in chain["namespaces"]
    ]
    columns = ("model", "adapter", "hashing", "block", "namespace", *(_TIERS.get(tier, tier) for tier in tiers))
    return [summary, *order, Section("by namespace", columns, rows)]
