"""`tiercache version`: the versions of tiercache and of what it runs on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from tiercache import __version__
from tiercache.cli.declare import Json, command
from tiercache.cli.exit_status import EXIT_OK
from tiercache.cli.report import print_json


@command("version", "  tiercache version", "0 always")
def version(as_json: Json = False) -> int:
    """Print the versions of tiercache and of what it runs on."""
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
