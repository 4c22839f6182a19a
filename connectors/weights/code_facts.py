"""The code that a model's modules run, beyond PyTorch's own: a description that is equal in every process.

    classes of modules ─► their methods ─► functions that these name in their modules, or have in closures ─► ...

Code of transformers is described by its name, since its version is part of every name; other code by its bytes. So a
method or a function of transformers that was replaced by another one is described by that. What is found is also kept
as references, which tell in microseconds whether something else stands there now.
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import transformers
import xxhash

_TRANSFORMERS = f"{Path(transformers.__file__).parent}{os.sep}"
_OTHERS = frozenset({"torch", "numpy", "builtins", "triton", "huggingface_hub", *sys.stdlib_module_names})
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MAX_FUNCTIONS = 20_000


def code_text(function: types.FunctionType) -> list[Any]:
    """A function's code, defaults and name, without what it refers to; equal in every process of one Python version."""
    code = function.__code__
    name = f"{function.__module__}.{function.__qualname__}"
    if _is_of_transformers(function):
        return [name]
    named = (function.__kwdefaults__ or {}).values()
    defaults = [repr(value) if isinstance(value, _PLAIN) else "" for value in (*(function.__defaults__ or ()), *named)]
    return [name, defaults, _digest(code)]


def _is_of_transformers(function: types.FunctionType) -> bool:
    return function.__code__.co_filename.startswith(_TRANSFORMERS)


def _has_settings(function: types.FunctionType) -> bool:
    """True if values in the function's module can be settings of how a model computes.

    In transformers those of its models only: others are the ids of sessions, clients and what is loaded on first use.
    """
    return not _is_of_transformers(function) or function.__module__.startswith("transformers.models.")


def _digest(code: types.CodeType) -> str:
    digest = xxhash.xxh3_128(code.co_code)
    for part in (code.co_names, code.co_varnames, code.co_freevars):
        digest.update(repr(part).encode())
    for const in code.co_consts:
        digest.update((_digest(const) if isinstance(const, types.CodeType) else _constant(const)).encode())
    return digest.hexdigest()


def _constant(const: Any) -> str:
    return repr(sorted(map(repr, const))) if isinstance(const, frozenset) else repr(const)


def _function_of(value: Any) -> types.FunctionType | None:
    """The function behind a method, a property or a wrapper of one."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) else None


def _is_foreign(module: str | None) -> bool:
    """True for code that computes nothing of a model's own, whose insides are not looked at."""
    module = module or ""
    return module.partition(".")[0] in _OTHERS or module.startswith("transformers.utils.")


class Same:
    """A list of objects, equal to another one of the very same objects."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, objects: list[Any]) -> None:
        self._objects = objects

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same) or len(self._objects) != len(other._objects):
            return False
        return all(map(operator.is_, self._objects, other._objects))


class CodeFacts:
    """What modules of these classes run, and `functions` besides.

    Attributes:
        texts: the description; as JSON can hold it.
    """

    def __init__(self, kinds: Iterable[type], functions: Iterable[Any]) -> None:
        self.texts: list[Any] = []
        self._places: list[tuple[Any, str]] = []  # where something was found: a dict or class, and a name
        self._known: set[int] = set()
        self._functions: list[types.FunctionType] = []  # kept, so that no id is given twice
        self._left: list[types.FunctionType] = []
        classes = dict.fromkeys(part for kind in kinds for part in kind.__mro__ if part is not object)
        for part in sorted(classes, key=lambda one: (one.__module__, one.__qualname__)):
            self._add_class(part)
        for value in functions:
            self._add(value)
        while self._left and len(self._known) < _MAX_FUNCTIONS:
            self._look_into(self._left.pop())

    def _add_class(self, kind: type) -> None:
        own = vars(kind)
        called = ["forward", "__call__"]
        named = [name for name in own if not name.startswith("__") or name in called]
        names = called if _is_foreign(kind.__module__) else {*called, *named}
        for name in sorted(names):
            self._places.append((kind, name))  # also of one that may come later
            if name not in own:
                continue
            value = own[name]
            if isinstance(value, _PLAIN):
                self.texts.append([kind.__qualname__, name, repr(value)])
            elif (function := _function_of(value)) is not None:
                self.texts.append([kind.__qualname__, name, code_text(function)])
                self._add(function)

    def _add(self, value: Any) -> None:
        function = _function_of(value)
        if function is not None and id(function) not in self._known and not _is_foreign(function.__module__):
            self._known.add(id(function))
            self._functions.append(function)
            self._left.append(function)

    def _look_into(self, function: types.FunctionType) -> None:
        text = code_text(function)
        for name in sorted(set(_names_of(function.__code__))):
            if name not in function.__globals__:
                continue
            value = function.__globals__[name]
            if isinstance(value, (types.ModuleType, type)):
                continue
            if (named := _function_of(value)) is not None:
                text.append([name, code_text(named)])
                self._add(named)
            elif not _has_settings(function):
                continue
            elif isinstance(value, _PLAIN):
                text.append([name, repr(value)])
            self._places.append((function.__globals__, name))
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty one
                value = cell.cell_contents
                if isinstance(value, _PLAIN):
                    text.append(repr(value))
                elif (inner := _function_of(value)) is not None:
                    text.append(code_text(inner))
                    self._add(inner)
        self.texts.append(text)

    def now(self) -> Same:
        """What stands now where these were found. Some tenths of a millisecond."""
        values = [(place if isinstance(place, dict) else vars(place)).get(name) for place, name in self._places]
        return Same([*values, *(function.__code__ for function in self._functions)])


def _names_of(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names_of(const)
