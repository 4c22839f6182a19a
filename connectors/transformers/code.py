"""The code that a model's modules run.

    classes of modules ─► all their methods
    `forward` ─► methods and functions that it names ─► what these name ─► ...

Without a `model_id` all of it has to be code of packages whose versions are part of the name (`packages`): then the
place of a function in its package says what it computes. What is found is also kept as references, which tell in
microseconds if something else stands there now.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tiercache.errors import ModelRefused

from .packages import NAMED, package_of, place_of
from .values import Values, refused

_CALLED = ("forward", "__call__", "__getattr__", "__getattribute__", "__getitem__", "__iter__", "__len__")
"""Methods that Python calls. Others of such names make and copy objects; PyTorch's compiler replaces some of them."""
_NOT_READ = (
    "_abc_impl",
    "_can_set_attn_implementation_cached_value",
    "_can_set_experts_implementation_cached_value",
    "config_class",
)
"""Attributes of classes that say nothing of what these compute."""
_FOLLOWED = ("torch", "torch.nn", "torch.nn.functional")
"""Modules in which replaced functions are found, too. They are the same in every process."""
_BY_CLASS = ("torch.nn.modules.", "builtins.object", "inspect.", "logging.", "typing.")
_WRAPPERS = (staticmethod, classmethod, property, functools.cached_property, type(functools.lru_cache(len)))


class Same:
    """A list of objects, equal to another one of the very same objects."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, objects: list[Any]) -> None:
        self._objects = objects

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same) or len(self._objects) != len(other._objects):
            return False
        return all(map(operator.is_, self._objects, other._objects))


class Code:
    """What modules run.

    Args:
        kinds: their classes, each with the name of a module of it.
        functions: functions that they call besides.
        is_strict: raise ModelRefused for code that is not of a known package.

    Attributes:
        texts: the description; as JSON can hold it.
        then: what stood where the code was found.
    """

    def __init__(self, kinds: Mapping[type, str], functions: Sequence[Any], is_strict: bool) -> None:
        self.texts: list[Any] = []
        self._given = Same([*kinds, *functions])
        self._is_strict = is_strict
        self._classes: list[type] = []
        self._methods: dict[str, list[types.FunctionType]] = {}
        self._places: list[tuple[dict[str, Any], str]] = []
        self._containers: list[Any] = []
        self._reached: dict[int, types.FunctionType] = {}  # kept, so that no id is given twice
        self._left: list[types.FunctionType] = []
        for kind, name in kinds.items():
            self._add_classes(kind, name)
        self.texts += [self._reach(function, "attention or experts") for function in functions]
        self._reach_methods(_CALLED)
        while self._left:
            self._look_into(self._left.pop())
        self.then = self._now()

    def is_of(self, kinds: Mapping[type, str], functions: Sequence[Any]) -> bool:
        """True if it is the code of these, as it stands now. Some tenths of a millisecond."""
        return Same([*kinds, *functions]) == self._given and self._now() == self.then

    def _now(self) -> Same:
        values: list[Any] = [*self._classes]
        for kind in self._classes:
            values += [value for name, value in vars(kind).items() if _is_read(name)]
        values += [space.get(name) for space, name in self._places]
        for container in self._containers:
            values += dict.values(container) if isinstance(container, dict) else container
        for function in self._reached.values():
            values += (function.__code__, function.__defaults__, *(function.__kwdefaults__ or {}).values())
        return Same(values)

    # --- what is found

    def _check(self, is_known: object, what: str) -> None:
        if self._is_strict and not is_known:
            raise refused(what)

    def _add_classes(self, kind: type, where: str) -> None:
        for part in kind.__mro__:
            name, package = f"{part.__module__}.{part.__qualname__}", package_of(part)
            self._check(package, f"the class of {where} is {name}")
            if part in self._classes or (package and package not in NAMED):
                continue
            self._classes.append(part)
            for key in sorted(filter(_is_read, vars(part))):
                functions = _functions_of(vars(part)[key])
                for function in functions:
                    self._check(place_of(function), f"{name}.{key} is the function {function.__qualname__}")
                self._methods.setdefault(key, []).extend(functions)
                places = [place_of(function) or function.__qualname__ for function in functions]
                self.texts.append([name, key, places or self._reach(vars(part)[key], f"{name}.{key}")])

    def _reach(self, value: Any, where: str) -> Any:
        """Describe a value, and remember to look into the functions that it has."""
        if issubclass(type(value), (dict, list, set)):
            self._containers.append(value)
        values = Values({}, self._is_strict, _BY_CLASS)
        try:
            described = [values.value(part) for part in _functions_of(value) or [value]]
        except ModelRefused as error:
            raise ModelRefused(f"{where} is {error}") from None
        self._check(not values.tensors, f"{where} has a tensor that is no part of the model")
        new = {id(function): function for function in values.functions if id(function) not in self._reached}
        self._reached |= new
        self._left += new.values()
        return described

    def _reach_methods(self, names: Iterable[str]) -> None:
        for method in (method for name in names for method in self._methods.get(name, ())):
            self._reach(method, method.__qualname__)

    def _look_into(self, function: types.FunctionType) -> None:
        """Reach what a function of transformers names, or the `forward` of one of PyTorch's modules in `_FOLLOWED`."""
        place = place_of(function)
        is_forward = place.startswith("torch/") and "/nn/modules/" in place and function.__name__ == "forward"
        if not (place.startswith("transformers/") or is_forward):
            return
        names = sorted(set(_names_of(function.__code__)))
        if not is_forward:
            self._reach_methods(names)
        # Elsewhere values are the ids of sessions, clients and what is loaded on first use.
        has_settings = str(function.__globals__.get("__name__")).startswith("transformers.models.")
        spaces: list[dict[str, Any]] = [function.__globals__]
        text: list[Any] = [place]
        for space in spaces:
            for name in (name for name in names if name in space and not name.startswith("__")):
                value, where = space[name], f"{space.get('__name__')}.{name}"
                if issubclass(type(value), types.ModuleType):
                    self._check(package_of(value), f"{where} is the module {value.__name__}")
                    if value.__name__ in _FOLLOWED and not any(vars(value) is one for one in spaces):
                        spaces.append(vars(value))
                elif callable(value) or (has_settings and space is function.__globals__):
                    text.append([name, self._reach(value, where)])
                else:
                    continue
                self._places.append((space, name))
        self.texts.append(text)


def _is_read(name: str) -> bool:
    return name in _CALLED if name.startswith("__") else name not in _NOT_READ


def _functions_of(value: Any) -> list[types.FunctionType]:
    """The functions behind a method, a property or a wrapper of one."""
    if type(value) not in _WRAPPERS:
        return [value] if type(value) is types.FunctionType else []
    found = (getattr(value, name, None) for name in ("__func__", "func", "__wrapped__", "fget", "fset", "fdel"))
    return [one for one in found if isinstance(one, types.FunctionType)]


def _names_of(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names_of(const)
