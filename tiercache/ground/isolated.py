"""Starts a Python process of this package: with the imports of its parent, never with those of a folder.

`python -m` looks for modules in the current directory first, which may be a folder that others can write to, such as
/tmp. `python_command` runs this very file instead, which removes its own folder from the path, adds that of the package
if nothing else does (a checkout), and then runs the module as `-m` would. PYTHONPATH still applies, unless the parent
ignores it. `-P` would do the same from Python 3.11 on; this works for all versions. `quick_command` is for processes
that are missed until they run.

As a script it may import nothing before the path is right.
"""

from __future__ import annotations

import os
import sys

_SCRIPT = os.path.abspath(__file__)  # now: the current directory may change later
_PATH = "--path="


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs `module` of this package in a new interpreter, as `python -m` would."""
    return [sys.executable, *_flags(), _SCRIPT, module, *arguments]


def quick_command(module: str, *arguments: str) -> list[str]:
    """The command that calls `main` of `module`, in the least time in which an interpreter starts.

    It gets this process's path as it is now, and reads no `.pth` files (`-S`), of which an environment may have many.
    """
    path = os.pathsep.join(folder for folder in sys.path if os.path.isabs(folder))
    return [sys.executable, *_flags(), "-S", _SCRIPT, _PATH + path, module, *arguments]


def _flags() -> list[str]:
    return ["-I"] if sys.flags.isolated else ["-E"] if sys.flags.ignore_environment else []


def _run() -> None:
    own = os.path.dirname(_SCRIPT)
    root = os.path.dirname(os.path.dirname(own))
    del sys.argv[0]
    quick = sys.argv[0].startswith(_PATH)
    path = sys.argv.pop(0)[len(_PATH) :].split(os.pathsep) if quick else sys.path
    sys.path[:] = [folder for folder in path if folder and folder != own]
    if root not in sys.path:
        sys.path.insert(0, root)
    if quick:
        sys.exit(__import__(sys.argv[0], fromlist=["main"]).main())
    import runpy

    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run()
