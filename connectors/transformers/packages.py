"""Which code belongs to an installed package with a version. Judged by where it is, not by what it says of itself."""

from __future__ import annotations

import functools
import os
import sys
import types
from pathlib import Path

NAMED = ("torch", "transformers", "accelerate", "bitsandbytes")
"""Packages that compute parts of a model. The versions of those that a model uses are part of its name."""
_HELPERS = ("huggingface_hub", "numpy", "packaging", "safetensors")
"""Packages that transformers uses, and that compute nothing of a model."""
_STDLIB = f"{Path(os.__file__).parent}{os.sep}"


def known(module: object) -> str:
    """The package of the module of that name; empty if it is not a known one."""
    top = str(module).partition(".")[0]
    return top if top in NAMED or top in _HELPERS or top in sys.stdlib_module_names else ""


def package_of(thing: type | types.ModuleType) -> str:
    """The package in which a class or module can be found under its name; empty if it is not a known one."""
    if issubclass(type(thing), types.ModuleType):
        return known(thing.__name__) if sys.modules.get(thing.__name__) is thing else ""
    found: object = sys.modules.get(thing.__module__)
    for name in thing.__qualname__.split("."):
        found = vars(found).get(name) if isinstance(found, (type, types.ModuleType)) else None
    return known(thing.__module__) if found is thing else ""


def place_of(function: types.FunctionType) -> str:
    """Package, version, file and line of a function; empty if it is not of a known package, or has other globals."""
    file, line = function.__code__.co_filename, f"{function.__code__.co_firstlineno} {function.__code__.co_name}"
    home = sys.modules.get(str(function.__globals__.get("__name__")))
    if home is None or vars(home) is not function.__globals__:
        return ""
    for package in (*NAMED, *_HELPERS):
        origin = getattr(sys.modules.get(package), "__file__", None)
        if origin and file.startswith(folder := _folder(origin)):
            return f"{package}/{version_of(package)}/{file[len(folder) :]}:{line}"
    is_stdlib = file.startswith("<frozen ") or (file.startswith(_STDLIB) and "-packages" not in file)
    return f"stdlib/{Path(file).name}:{line}" if is_stdlib else ""


@functools.cache
def _folder(origin: str) -> str:
    return f"{Path(origin).parent}{os.sep}"


def version_of(package: str) -> str:
    return str(getattr(sys.modules.get(package), "__version__", ""))
