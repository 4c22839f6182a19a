"""The daemon's configuration: one frozen object, and the sources of its values.

    TOML file  <  TIERCACHE_* environment  <  command-line flags

Every setting has one key. `arena` in the file is `TIERCACHE_ARENA` in the environment and
`--arena` on the command line. Sizes are written as `16GiB`, durations as `60s`.

This module also resolves where a daemon is found: an *address* is the path of its run directory,
which holds the session socket and the control socket.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tiercache.config.setting_kinds import (
    MAX_REGIONS,
    MAX_SOCKET_PATH_BYTES,
    events_problem,
    http_problem,
    is_utf8,
    toml_bytes,
    without_secrets,
)
from tiercache.config.settings import ENV_PREFIX, SETTINGS, Settings, default_run_dir
from tiercache.errors import ConfigError
from tiercache.ground.units import HUGE_PAGE_BYTES, round_up

if TYPE_CHECKING:
    import argparse

QUARANTINE_FLOOR_BYTES = 64 << 20

DEFAULT = "default"
"""Source of a setting that was not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig(Settings):
    """Every setting of the daemon, checked.

    Values are the effective ones: `region_bytes` is fitted to the arena, and a
    `quarantine_per_client_bytes` of 0 becomes a quarter of it, at least 64 MiB. Raises ConfigError for values that
    cannot work.
    """

    def __post_init__(self) -> None:
        for setting in SETTINGS.values():
            value = getattr(self, setting.field)
            if problem := setting.kind.check(value):
                raise ConfigError(f"{setting.key} = {value}: {problem}")
        for key, value in (("kv_events", self.kv_events), ("kv_events_replay", self.kv_events_replay)):
            connects = self.kv_events_connect and key == "kv_events"
            if value and (problem := events_problem(value, self.kv_events_allow_remote, connects)):
                raise ConfigError(f"{key} = {value}: {problem}")
        if self.kv_events_replay and self.kv_events_replay == self.kv_events:
            raise ConfigError(f"kv_events_replay = {self.kv_events_replay}: is that of kv_events: choose another one")
        if not self.kv_events and (self.kv_events_replay or self.kv_events_topic or self.kv_events_connect):
            which = "kv_events_replay, kv_events_topic and kv_events_connect"
            raise ConfigError(f"{which} mean nothing without kv_events: set that too")
        if self.shared and self.shared_key is None and not self.shared_plain:
            text = (
                "blocks there are encrypted: set shared_key to a file with a key that all hosts have, or shared_plain"
            )
            raise ConfigError(f"shared = {self.shared}: {text} = yes where nobody else reaches the store")
        if self.shared_key is not None and self.shared_plain:
            raise ConfigError("shared_key and shared_plain = yes: with a key blocks are encrypted: set one of them")
        if bool(self.listen) != (self.curve_keys is not None):
            text = "TCP is served with keys only: set both, and make the keys with `tiercache keygen DIR`"
            raise ConfigError(f"listen = {self.listen}, curve_keys = {self.curve_keys or ''}: {text}")
        if self.http and (problem := http_problem(self.http, self.http_allow_remote)):
            raise ConfigError(f"http = {self.http}: {problem}")
        set_field = object.__setattr__  # the one place where a frozen object may be written
        set_field(self, "arena_bytes", self.arena_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
        if self.headroom_bytes > self.arena_bytes // 2:
            text = f"more than half of arena = {toml_bytes(self.arena_bytes)}: leave room for what is kept"
            raise ConfigError(f"headroom = {toml_bytes(self.headroom_bytes)}: {text}")
        least = round_up(-(-self.arena_bytes // MAX_REGIONS), HUGE_PAGE_BYTES)
        set_field(self, "region_bytes", min(max(self.region_bytes, least), self.arena_bytes))
        if self.quarantine_per_client_bytes == 0:
            set_field(self, "quarantine_per_client_bytes", max(self.arena_bytes // 4, QUARANTINE_FLOOR_BYTES))

    @property
    def has_secrets(self) -> bool:
        """True if the daemon gets to know a key, or the password of a store."""
        return bool(self.curve_keys or self.nvme_key or self.shared_key or self.shared)

    @property
    def nvme_paths(self) -> tuple[Path, ...]:
        """Paths of the nvme directories."""
        return tuple(one.path for one in self.nvme_dirs)

    def nvme_shares(self) -> dict[Path, int]:
        """The size limit of each nvme directory, in bytes."""
        part_bytes = self.nvme_bytes // max(1, sum(not one.size_bytes for one in self.nvme_dirs))
        return {one.path: one.size_bytes or part_bytes for one in self.nvme_dirs}

    @property
    def nvme_capacity_bytes(self) -> int:
        """The size limit of all nvme directories together; 0 if there are none."""
        rest_bytes = self.nvme_bytes if any(not one.size_bytes for one in self.nvme_dirs) else 0
        return sum(one.size_bytes for one in self.nvme_dirs) + rest_bytes

    def region_sizes(self) -> list[int]:
        """Sizes of the arena's regions in bytes: all `region_bytes`, the last perhaps less."""
        whole, rest = divmod(self.arena_bytes, self.region_bytes)
        return [self.region_bytes] * whole + ([rest] if rest else [])


class Resolved(NamedTuple):
    """A configuration, the source of each key's value (`DEFAULT` if it was not set), and the values that were set.

    A value of `config` may follow from other settings, or from limits of this process; those of `given`, by field, are
    as they were written.
    """

    config: DaemonConfig
    sources: dict[str, str]
    given: dict[str, Any]


def load_config(
    path: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> DaemonConfig:
    """The daemon's settings from a TOML file, the environment and flags, later ones winning.

    Args:
        path: the file; None means $TIERCACHE_CONFIG, and without that no file.
        env: the environment, `os.environ` by default.
        flags: key -> value, as text or already a number; None values are flags not given.

    Raises ConfigError, which names key, value, source and remedy. Reads one small file.
    """
    return resolve_config(path, env, flags).config


def resolve_config(
    path: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Resolved:
    """`load_config`, with the source of each value beside it."""
    env = os.environ if env is None else env
    path = path or env.get(ENV_PREFIX + "CONFIG") or None
    layers: list[dict[str, tuple[Any, str]]] = [
        {} if path is None else _from_file(Path(path)),
        _from_environment(env),
        _from_flags(flags or {}),
    ]
    values: dict[str, Any] = {"run_dir": default_run_dir(env)}
    sources = dict.fromkeys(SETTINGS, DEFAULT)
    for layer in layers:
        for key, (value, source) in layer.items():
            values[SETTINGS[key].field] = parse_setting(key, value, source)
            sources[key] = source
    return Resolved(DaemonConfig(**values), sources, values)


def parse_setting(key: str, value: Any, source: str) -> Any:
    """The field's value of one setting. Raises ConfigError, which names `source`."""
    setting = SETTINGS[key]
    where = f"{key} = {without_secrets(value)} (from {source})"
    takes = isinstance(value, (str, int, float, os.PathLike))
    if not takes or (isinstance(value, bool) and not setting.kind.takes_bool):
        raise ConfigError(f"{where}: must be a text or a number, not a {type(value).__name__}")
    if not is_utf8(str(value)):
        raise ConfigError(f"{where}: is not UTF-8: write it in UTF-8, or choose another name")
    try:
        parsed = setting.kind.parse(value)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    except OverflowError:
        raise ConfigError(f"{where}: is larger than any machine") from None
    if problem := setting.kind.check(parsed):
        raise ConfigError(f"{where}: {problem}")
    return parsed


def _from_file(path: Path) -> dict[str, tuple[Any, str]]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"config file {path}: {error.strerror}: give --config or TIERCACHE_CONFIG a file that can be read"
        ) from None
    except ValueError as error:  # of TOML or of UTF-8
        raise ConfigError(f"config file {path} is not TOML: {error}: `tiercache config` prints one") from None
    for key in table:
        if key not in SETTINGS:
            raise ConfigError(f"{key} = {without_secrets(table[key])} (from {path}): no such setting{_nearest(key)}")
    return {key: (value, str(path)) for key, value in table.items()}


def _from_environment(env: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    # An unknown name is only refused when it looks like a typo: Kubernetes gives pods TIERCACHE_PORT and
    # TIERCACHE_SERVICE_HOST when a Service is called tiercache.
    found: dict[str, tuple[Any, str]] = {}
    for name, value in env.items():
        if not name.startswith(ENV_PREFIX) or value == "":
            continue
        key = name[len(ENV_PREFIX) :].lower()
        if key in SETTINGS:
            found[key] = (value, name)
        elif near := _nearest(key, env=True):
            raise ConfigError(f"{name} = {without_secrets(value)} (from the environment): no such setting{near}")
    return found


def _from_flags(flags: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for key, value in flags.items():
        if key not in SETTINGS:
            raise ConfigError(f"{key} = {without_secrets(value)} (from flags): no such setting{_nearest(key)}")
        if value is not None:
            found[key] = (value, flag_name(key))
    return found


def _nearest(key: str, *, env: bool = False) -> str:
    from difflib import get_close_matches

    near = get_close_matches(key.lower(), SETTINGS, n=1, cutoff=0.8 if env else 0.5)
    if env:
        return f": did you mean {ENV_PREFIX}{near[0].upper()}?" if near else ""
    return f": did you mean {near[0]}?" if near else f": there are {', '.join(SETTINGS)}"


def flag_name(key: str) -> str:
    """`lease_ttl_max` -> `--lease-ttl-max`."""
    return "--" + key.replace("_", "-")


def env_name(key: str) -> str:
    """`lease_ttl_max` -> `TIERCACHE_LEASE_TTL_MAX`."""
    return ENV_PREFIX + key.upper()


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--config` and a flag for every setting; `flags_from_args` picks them up again."""
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings (default: $TIERCACHE_CONFIG)")
    group = parser.add_argument_group(
        "settings",
        'Each may also stand in the file (arena = "16GiB") or in the environment (TIERCACHE_ARENA=16GiB). '
        "Flags win over the environment, and the environment over the file.",
    )
    defaults = DaemonConfig(run_dir=default_run_dir())
    for setting in SETTINGS.values():
        default = setting.kind.render(getattr(defaults, setting.field)).strip('"')
        shown = f" (default: {default})" if setting.key != "quarantine_per_client" else ""
        text = (setting.doc + shown).replace("%", "%%")
        group.add_argument(flag_name(setting.key), dest=setting.key, metavar=setting.kind.metavar, help=text)


def flags_from_args(args: argparse.Namespace) -> dict[str, str]:
    """The settings given on the command line: `load_config(args.config, flags=flags_from_args(args))`."""
    return {key: getattr(args, key) for key in SETTINGS if getattr(args, key, None) is not None}


def render_toml(config: DaemonConfig, comments: bool = True, sources: Mapping[str, str] | None = None) -> str:
    """The settings as TOML, which `load_config` reads back to an equal object.

    With `comments` each setting is explained, and those at their default are commented out: the
    file shows what was chosen and what can be set. `sources` adds where a value came from.
    """
    from textwrap import TextWrapper

    wrap = TextWrapper(98, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False).wrap
    defaults = DaemonConfig()
    fitted = DaemonConfig(arena_bytes=config.arena_bytes)  # defaults that follow from the arena
    lines = [*_TOML_HEAD, ""] if comments else []
    for setting in SETTINGS.values():
        value = getattr(config, setting.field)
        line = f"{setting.key} = {setting.kind.render(value)}"
        if not comments:
            lines.append(line)
            continue
        default = getattr(defaults if setting.key == "arena" else fitted, setting.field)
        source = (sources or {}).get(setting.key, DEFAULT)
        if source != DEFAULT:
            line += f"  # from {source}"
        elif value == default:
            line = f"#{line}"
        lines += [*wrap(setting.doc), line, ""]
    return "\n".join(lines).rstrip() + "\n"


_TOML_HEAD = (
    "# Settings of the tiercache daemon. A line with # and no space after it is a default.",
    "# TIERCACHE_ARENA=16GiB in the environment and --arena 16GiB on the command line win over this file.",
)


def default_address() -> str:
    """The daemon's default address: its default run directory."""
    return str(default_run_dir())


def session_socket_path(run_dir: str | Path) -> Path:
    """Path of the session socket, where clients say hello and receive the arena. Raises ConfigError when too long."""
    return _socket_path(Path(run_dir) / "session.sock")


def control_endpoint(run_dir: str | Path) -> str:
    """ZeroMQ endpoint of the control socket. Raises ConfigError when too long for a socket."""
    return f"ipc://{_socket_path(Path(run_dir) / 'control.sock')}"


def _socket_path(path: Path) -> Path:
    if not is_utf8(str(path)):
        raise ConfigError(f"run_dir = {os.fsencode(path.parent)!r}: is not UTF-8: choose another directory")
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"run_dir = {path.parent}: {path.name} in it makes a path of {size} bytes, and a unix socket's "
            f"may have {MAX_SOCKET_PATH_BYTES}: choose a shorter directory, for example /run/tiercache"
        )
    return path


__all__ = [
    "DaemonConfig",
    "Resolved",
    "add_config_flags",
    "control_endpoint",
    "default_address",
    "default_run_dir",
    "env_name",
    "flag_name",
    "flags_from_args",
    "load_config",
    "parse_setting",
    "render_toml",
    "resolve_config",
    "session_socket_path",
]
