"""`tiercache config` and `tiercache set`: settings as they would be, as they are, and changed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tiercache.cli.connection import connected
from tiercache.cli.declare import SILENT, Address, ConfigFile, Json, command
from tiercache.cli.exit_status import EXIT_OK
from tiercache.cli.report import print_json
from tiercache.config.daemon_config import DEFAULT, render_toml, resolve_config
from tiercache.config.settings import SETTINGS
from tiercache.errors import ConfigError, RequestRefused


@command(
    "config",
    """\
  tiercache config > tiercache.toml   a file to start from: every setting, explained
  TIERCACHE_ARENA=16GiB tiercache config
                                      also says where each value that is not a default came from
  tiercache config --running          what the daemon uses, and what a restart would change
""",
)
def config(
    path: ConfigFile = None,
    running: Annotated[bool, typer.Option("--running", help="Show those of the running daemon.")] = False,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Print the settings that a daemon started here would use, or with --running those of the running daemon.

    On SIGHUP (systemctl reload) the daemon reads its settings again; log_level and the quotas change at once.
    """
    return _show_running(address, as_json) if running else _show(path, as_json)


def _show(path: Path | None, as_json: bool) -> int:
    """Print the settings that would apply, and the source of each that is not a default. Raises ConfigError."""
    config, sources, _ = resolve_config(path)
    if not as_json:
        print(render_toml(config, sources=sources), end="")
        return EXIT_OK
    tree = {}
    for key, setting in SETTINGS.items():
        value = getattr(config, setting.field)
        raw = value if isinstance(value, (int, float)) else str(value)
        tree[key] = {"value": raw, "text": setting.kind.render(value).strip('"'), "source": sources[key]}
    print_json(tree)
    return EXIT_OK


def _show_running(address: str | None, as_json: bool) -> int:
    """Print the settings that a running daemon uses. Raises DaemonUnavailable."""
    from tiercache.protocol.messages import Settings

    with connected(address) as client:
        answer = client.session().call(Settings)
    if as_json:
        settings = {
            one.key: {
                "value": one.value.strip('"'),
                "source": one.source,
                "live": one.live,
                "next_start": one.next_start and one.next_start.strip('"'),
            }
            for one in answer.settings
        }
        print_json({"settings": settings, "problem": answer.problem})
        return EXIT_OK
    for one in answer.settings:
        notes = [f"from {one.source}"] if one.source != DEFAULT else []
        if one.next_start is not None:
            when = "a reload or restart" if one.live else "a restart"
            notes.append(f"{when} makes it {one.next_start}")
        print(f"{one.key} = {one.value}" + (f"  # {'; '.join(notes)}" if notes else ""))
    if answer.problem:
        print(f"# what a restart would change is not known: {answer.problem}")
    return EXIT_OK


@command(
    "set",
    """\
  tiercache set log_level=debug       until the daemon reloads its settings or is restarted
  tiercache set quota='team-a=16GiB,*=1GiB'
  tiercache config --running          shows what was set by hand
""",
    f"0 it was changed, 1 no daemon runs, 2 a wrong setting or value, {SILENT}",
)
def set_(
    assignment: Annotated[str, typer.Argument(metavar="KEY=VALUE", help="log_level, quota or nvme_quota.")],
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Change a setting of a running daemon: log_level, quota or nvme_quota.

    The change lasts until the daemon reloads its settings (SIGHUP) or restarts. To keep it, write it to the file too.
    """
    from tiercache.protocol.messages import ChangeSetting, ErrorCode

    key, equals, value = assignment.partition("=")
    if not equals:
        raise ConfigError(f"{assignment}: write KEY=VALUE, for example log_level=debug")
    with connected(address) as client:
        try:
            answer = client.session().call(ChangeSetting, key=key.strip(), value=value.strip())
        except RequestRefused as error:
            if error.code != ErrorCode.BAD_VALUE.value:
                raise
            raise ConfigError(error.text) from None
    if as_json:
        print_json({"key": key.strip(), "value": answer.value.strip('"'), "note": answer.note})
        return EXIT_OK
    print(f"{key.strip()} = {answer.value} until the daemon reloads its settings or is restarted")
    if answer.note:
        print(answer.note)
    return EXIT_OK
