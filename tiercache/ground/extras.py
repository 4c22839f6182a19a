"""Advice for a missing package. No error text has a `pip install` line of its own.

On PyPI the name `tiercache` belongs to another project, and this one is installed from a checkout or a wheel. So a text
never names a distribution of ours for an index to look up: in a checkout it names the checkout, and elsewhere the
packages of the extra.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

DISTRIBUTION = "tiercache-kv"
"""What pip calls this project. It is imported as `tiercache`, and so is the command."""

_EXTRA = re.compile(r"""extra\s*==\s*["']([\w-]+)["']""")


def install_extra(*extras: str) -> str:
    """The command that adds `extras` to this installation, such as "python -m pip install --editable '/src[http]'"."""
    if checkout := _checkout():
        return _pip("--editable", f"{checkout}[{','.join(extras)}]")
    return install_packages(*_requirements(extras))


def install_packages(*packages: str) -> str:
    """The command that installs other projects' packages where this Python finds them."""
    return _pip(*packages)


def _pip(*arguments: str) -> str:
    from importlib.util import find_spec

    if find_spec("pip") is None:  # an image that has removed it, an environment of uv's
        return f"install {' '.join(arguments)} into {sys.prefix}"
    return shlex.join([sys.executable or "python3", "-m", "pip", "install", *arguments])


def _checkout() -> Path | None:
    """The folder with our pyproject.toml, if this module was imported from there."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() else None


def _requirements(extras: tuple[str, ...]) -> list[str]:
    """The requirements of these extras, from the installed distribution."""
    from importlib import metadata

    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # files that were copied
        lines = []
    pairs = [line.partition(";") for line in lines]
    wanted = [
        requirement.strip().replace(" ", "")
        for requirement, _, marker in pairs
        if (extra := _EXTRA.search(marker)) and extra[1] in extras
    ]
    return list(dict.fromkeys(wanted)) or [f"the packages of {', '.join(extras)} in pyproject.toml"]
