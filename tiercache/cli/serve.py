"""`tiercache serve`: its flags. The engine's flags are the fields of `EngineSettings`.

The help loads neither torch nor transformers, so it works before they are installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tiercache.cli.exit_status import EXIT_USAGE
from tiercache.engine.settings import CHOICES, EngineSettings
from tiercache.errors import ConfigError
from tiercache.ground.arguments import HelpFormatter
from tiercache.ground.extras import install_extra
from tiercache.serve.settings import ServeSettings

_EXAMPLES = """\
Exit status: 0 stopped by a signal, 1 the engine failed, 2 a wrong setting.

Examples:
  tiercache serve ./Qwen3-0.6B --kv-cache-memory 4GiB
  tiercache serve ./Qwen3-0.6B --arena 32GiB --nvme /mnt/nvme0/kv --nvme-size 1TiB
  tiercache serve ./Qwen3-0.6B --daemon /run/tiercache --host 0.0.0.0 --port 8000
  curl localhost:8000/v1/completions --json '{"prompt": "Once upon", "max_tokens": 16}'
"""
API_KEY_VARIABLE = "TIERCACHE_API_KEY"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: see `tiercache serve --help`")


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = _Parser(
        prog="tiercache serve",
        description="Serve a Hugging Face model over HTTP, with an interface like OpenAI's.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="Hugging Face decoder folder")
    _add_server_flags(parser.add_argument_group("server"))
    _add_cache_flags(parser.add_argument_group("cache", "By default a private daemon, which ends with the server."))
    _add_engine_flags(parser.add_argument_group("engine"))
    return parser


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    fields = {field.name: field.default for field in dataclasses.fields(ServeSettings)}
    for name, kind, metavar, text in (
        ("host", str, "ADDRESS", "address to listen on"),
        ("port", int, "N", "port to listen on; 0 is any that is free"),
        (
            "allowed_hosts",
            str,
            "HOST,...",
            "further names that requests and web pages may be of, such as a proxy's. Without any, an address of this "
            "host is only asked as localhost, 127.0.0.1, [::1] or itself",
        ),
        ("served_model_name", str, "NAME", "what clients call the model (default: the folder's name)"),
        ("api_key", str, "KEY", f"what clients must send as a bearer token (or ${API_KEY_VARIABLE})"),
        ("chat_template", Path, "FILE", "Jinja template that stands in for the model's own"),
        ("max_queued_requests", int, "N", "prompts that may wait for their first token; more are refused with 429"),
    ):
        default = f" (default: {fields[name]})" if fields[name] not in ("", None) else ""
        group.add_argument(_flag(name), type=kind, metavar=metavar, default=fields[name], help=text + default)
    group.add_argument(
        "--grace",
        dest="grace_s",
        type=float,
        metavar="SECONDS",
        default=fields["grace_s"],
        help=f"on SIGTERM, how long running requests may take (default: {fields['grace_s']:g})",
    )
    group.add_argument(
        "--stall-timeout",
        dest="stall_timeout_s",
        type=float,
        metavar="SECONDS",
        default=fields["stall_timeout_s"],
        help="when the engine has not advanced for so long, its requests fail and /health says so "
        f"(default: {fields['stall_timeout_s']:g})",
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least important lines that are logged, to stderr (default: info)",
    )


def _add_cache_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--arena", metavar="SIZE", default="1GiB", help="DRAM of the private daemon (default: 1GiB)")
    group.add_argument("--nvme", metavar="DIRS", default="", help="its directories on local disks, with commas between")
    group.add_argument("--nvme-size", metavar="SIZE", default="", help="what these may take together")
    group.add_argument("--daemon", metavar="DIR", type=Path, help="use the daemon with this run directory instead")
    group.add_argument("--no-cache", dest="cache", action="store_false", help="use none: blocks stay in the KV pool")


def _add_engine_flags(group: argparse._ArgumentGroup) -> None:
    explained = _attributes(EngineSettings)
    for field in dataclasses.fields(EngineSettings):
        default = field.default
        shown = default if default != "" else "none"
        text = f"{explained.get(field.name, '')} (default: {shown})".replace("%", "%%").strip()
        if isinstance(default, bool):
            action: Any = argparse.BooleanOptionalAction
            group.add_argument(_flag(field.name), action=action, default=default, help=text)
        else:
            # A field that takes a number or a text gets the text: the settings interpret it.
            kind = type(default) if "|" not in str(field.type) else str
            group.add_argument(_flag(field.name), type=kind, default=default, metavar=_metavar(field), help=text)


def _metavar(field: dataclasses.Field[Any]) -> str:
    """The value of a flag in one word: its choices if any, else its unit."""
    if field.name in CHOICES:
        return "|".join(CHOICES[field.name])
    if field.name.endswith("_s"):
        return "SECONDS"
    if "|" in str(field.type):
        return "SIZE"
    return {int: "N", float: "SHARE"}.get(type(field.default), "TEXT")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _attributes(settings: type) -> dict[str, str]:
    """The docstring's text for each field."""
    _, _, text = inspect.cleandoc(settings.__doc__ or "").partition("Attributes:\n")
    parts = re.split(r"^    (\w+): ", text, flags=re.MULTILINE)
    return {name: " ".join(part.split()) for name, part in zip(parts[1::2], parts[2::2], strict=True)}


def main(arguments: Sequence[str]) -> int:
    """Serve as the command line says; returns the exit status. Raises the errors of `tiercache.errors`."""
    values = vars(make_parser().parse_args(list(arguments)))
    logging.basicConfig(level=values.pop("log_level").upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    names = {field.name for field in dataclasses.fields(EngineSettings)}
    engine_settings = EngineSettings(**{name: value for name, value in values.items() if name in names})
    own = {name: value for name, value in values.items() if name not in names}
    own["api_key"] = own["api_key"] or os.environ.get(API_KEY_VARIABLE, "")
    settings = ServeSettings(**own)
    # Both are read when torch and transformers are loaded. Threads of torch that wait must not spin: the daemon
    # and the event loop need the cores too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        from tiercache.serve.server import serve
    except ImportError as error:
        print(f"tiercache: serve needs {error.name}: {install_extra('engine', 'serve')}", file=sys.stderr)
        return EXIT_USAGE
    return serve(settings, engine_settings)
