"""`tiercache config`, `tiercache set` and `tiercache version`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

from tiercache import __version__
from tiercache.cli.exits import EXIT_OK
from tiercache.cli.report import print_json
from tiercache.config.daemon_config import DEFAULT, render_toml, resolve_config
from tiercache.config.settings import SETTINGS
from tiercache.errors import ConfigError, RequestRefused


def show(path: Path | None, *, as_json: bool) -> int:
    """Print the effective settings, and the source of each that is not a default. Raises ConfigError."""
    config, sources = resolve_config(path)
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


def show_running(address: str | None, *, as_json: bool) -> int:
    """Print the settings that a running daemon uses. Raises DaemonUnavailable."""
    from tiercache.cli.control import connected
    from tiercache.protocol.messages import SettingList, Settings

    with connected(address) as client:
        answer = client.session().call(Settings, SettingList)
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
        print(f"# what a restart would have is not known: {answer.problem}")
    return EXIT_OK


def change(address: str | None, assignment: str, *, as_json: bool) -> int:
    """Change a setting of a running daemon. Raises ConfigError, RequestRefused, DaemonUnavailable."""
    from tiercache.cli.control import connected
    from tiercache.protocol.messages import Changed, ChangeSetting

    key, equals, value = assignment.partition("=")
    if not equals:
        raise ConfigError(f"{assignment}: write KEY=VALUE, for example log_level=debug")
    with connected(address) as client:
        try:
            answer = client.session().call(ChangeSetting, Changed, key=key.strip(), value=value.strip())
        except RequestRefused as error:
            raise ConfigError(error.text) from None
    if as_json:
        print_json({"key": key.strip(), "value": answer.value.strip('"'), "note": answer.note})
        return EXIT_OK
    print(f"{key.strip()} = {answer.value} until the daemon reloads its settings or is restarted")
    if answer.note:
        print(answer.note)
    return EXIT_OK


def version(*, as_json: bool) -> int:
    """Print the versions of tiercache, of the libraries it uses, and of Python."""
    from tiercache.protocol.messages import PROTOCOL

    versions = {
        "tiercache": __version__,
        "protocol": str(PROTOCOL),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("pyzmq", "msgspec", "numpy", "torch", "transformers", "triton")},
    }
    if as_json:
        print_json(versions)
    else:
        others = ", ".join(f"{name} {number}" for name, number in versions.items() if name != "tiercache")
        print(f"tiercache {versions['tiercache']} ({others})")
    return EXIT_OK


def _version(name: str) -> str:
    try:
        return installed_version(name)
    except PackageNotFoundError:
        return "not installed"
