"""`tiercache config` and `tiercache version`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

from tiercache import __version__
from tiercache.cli.main import EXIT_OK
from tiercache.cli.report import print_json
from tiercache.config import render_toml, resolve_config
from tiercache.settings import SETTINGS


def show(path: Path | None, *, as_json: bool) -> int:
    """Print the effective settings, and where each that is no default came from. Raises ConfigError."""
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


def version(*, as_json: bool) -> int:
    """Print the versions of tiercache, of the libraries that it stands on, and of Python."""
    from tiercache.messages import PROTOCOL

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
