"""What a model's modules have as attributes, in a form that can be compared, and is equal in every process.

Described are plain values, tensors, arrays, configs, functions of packages that have a version, and small containers of
these. Anything else is code of somebody, or may hold some. Only a `model_id` can name it: without one it is refused,
with one it is described by its class and compared by reference.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from tiercache.errors import ModelRefused
from transformers import PretrainedConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from .packages import NAMED, known, package_of, place_of, version_of

MAX_DEPTH = 6
MAX_ELEMENTS = 16_384
"""Elements of all containers and arrays of one model."""
_IGNORED = frozenset(vars(torch.nn.Module())) | {
    "_is_hf_initialized",
    "_output_capturing_hooks_installed",
    "gradient_checkpointing",
    "_gradient_checkpointing_func",
    "_require_grads_hook",
    "_require_grads_hooks",
    "name_or_path",
    "loss_type",
    "_loss_function",
    "hf_device_map",
    "warnings_issued",
    "generation_config",
    "_tp_plan",
    "_ep_plan",
    "_pp_plan",
    "_fsdp_plan",
    "_name_or_path",
    "_previous_max_cache_length",
    "_compiled_call",
    "_last_compile_config",
    "architectures",
    "model_tags",
    "transformers_version",
    "_commit_hash",
}
"""What PyTorch keeps in a module, what has no effect, what is checked elsewhere, and where a config comes from."""
_AS_IS = frozenset({int, str, type(None)})
_AS_TEXT = frozenset({bool, float, complex, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format})
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_BY_CLASS = ("transformers.", "accelerate.", "bitsandbytes.", "torch.autograd.grad_mode.")
_CASTS = "accelerate.hooks.LayerwiseCastingHook"
_INSIDE = ("hooks", "SCB", "threshold")
"""Attributes of objects that are else described by their class: a sequence of Accelerate's hooks, 8-bit scales."""
_STATES = ("quant_state", "state2")
"""Attributes of bitsandbytes parameters that hold further tensors."""


def refused(what: str) -> ModelRefused:
    return ModelRefused(f"{what}: pass model_id= that names the weights and this code")


class Values:
    """One reading of a model's attributes.

    Args:
        known: names of objects that are described elsewhere, by their ids: modules and configs of the model.
        is_strict: raise ModelRefused for what cannot be described.
        by_class: beginnings of the names of modules whose other objects are described by their class.

    Attributes:
        objects: classes of modules, and what is described by its class alone, to be compared by reference.
        functions: functions that were found.
        tensors: tensors that were found, by their numbers.
    """

    def __init__(self, known: Mapping[int, str], is_strict: bool, by_class: tuple[str, ...] = ()) -> None:
        self.objects: list[Any] = []
        self.functions: list[types.FunctionType] = []
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._known = known
        self._is_strict = is_strict
        self._by_class = _BY_CLASS + by_class
        self._elements = 0

    def part(self, name: str, part: Any) -> list[Any]:
        """The class, attributes and hooks of a module, or a config with what it does not save."""
        own, key = vars(part), ""
        found: dict[str, Any] = {}
        self.objects.append(type(part))
        try:
            for key, value in own.items():
                if key not in _IGNORED:
                    found[key] = value if type(value) in _AS_IS else self.value(value)
            for key in ("_forward_hooks", "_forward_pre_hooks"):
                if hooks := self.hooks(own.get(key, {}).values()):
                    found[key] = hooks
            if (value := own.get(key := "_compiled_call_impl")) is not None:
                found[key] = self.value(value)
        except ModelRefused as error:
            raise ModelRefused(f"{key} of {name or 'the model'} is {error}") from None
        return [name, _name(type(part)), found]

    def hooks(self, hooks: Iterable[Any]) -> list[Any]:
        """Hooks, without those of transformers, which only watch."""
        places = ((hook, place_of(hook) if type(hook) is types.FunctionType else "") for hook in hooks)
        return [self.value(hook) for hook, place in places if not place.startswith("transformers/")]

    def tensor_class(self, kind: type) -> str:
        return _name(kind) if package_of(kind) else self._other(kind, f"a tensor of {_name(kind)}")

    def value(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind in _AS_IS:
            return value
        if kind in _AS_TEXT:
            return (repr(value),)
        if issubclass(kind, torch.Tensor):
            described = ["tensor", len(self.tensors), self.tensor_class(kind)]
            if value.is_meta:
                return self._other(value, "a tensor without bytes")
            self.tensors.append((f"attribute {len(self.tensors)}", value))
            return described
        if kind is np.ndarray or (issubclass(kind, np.generic) and package_of(kind) == "numpy"):
            return self._array(value)
        if (name := self._known.get(id(value))) is not None:
            return ["part", name]
        if depth > MAX_DEPTH:
            return self._other(value, f"more than {MAX_DEPTH} levels deep")
        if issubclass(kind, type):
            return ["class", _name(value) if package_of(value) else self._other(value, f"the class {_name(value)}")]
        return self._function(value, depth) if kind in _FUNCTIONS else self._object(value, depth)

    def _object(self, value: Any, depth: int) -> Any:
        kind, name = type(value), _name(type(value))
        package = "builtins" if kind in _CONTAINERS else package_of(kind)
        if kind is functools.partial:
            return ["partial", *(self.value(part, depth + 1) for part in (value.func, value.args, value.keywords))]
        if issubclass(kind, _CONTAINERS) and (kind in (*_CONTAINERS, OrderedDict) or package in NAMED):
            return self._container(value, depth)
        if issubclass(kind, enum.Enum) and package:
            return [name, value.name]
        if issubclass(kind, (PretrainedConfig, QuantizationConfigMixin)) and package:
            return self.part(name, value)
        if name == _CASTS:
            raise ModelRefused("a hook that casts the weights during each call: cast them once, with model.to(dtype)")
        if package and name.startswith(self._by_class):
            inner = {key: one for key, one in getattr(value, "__dict__", {}).items() if key in _INSIDE}
            return [name, version_of(package), self.value(inner, depth + 1)]
        what = "a module that is not the model's, of" if issubclass(kind, torch.nn.Module) else "an object of"
        return self._other(value, f"{what} {name}")

    def _container(self, value: Any, depth: int) -> Any:
        kind = type(value)
        self._elements += len(value)
        if self._elements > MAX_ELEMENTS:
            return self._other(value, f"too large: {MAX_ELEMENTS} elements are read of one model")
        if issubclass(kind, dict):
            pairs = ([self.value(key, depth + 1), self.value(item, depth + 1)] for key, item in dict.items(value))
            return [_name(kind), sorted(pairs, key=repr)]
        items = [self.value(item, depth + 1) for item in value]
        return [_name(kind), sorted(items, key=repr) if issubclass(kind, (set, frozenset)) else items]

    def _function(self, value: Any, depth: int) -> Any:
        """Where it is, with its defaults and what it closes over."""
        if type(value) is types.MethodType:
            return ["method", self.value(value.__func__, depth + 1), self.value(value.__self__, depth + 1)]
        name = f"{value.__module__}.{value.__qualname__}"
        if type(value) is types.BuiltinFunctionType:
            owner = value.__self__  # a method of an object computes with it
            is_free = issubclass(type(owner), (type, types.ModuleType, type(None)))
            is_known = is_free and known(value.__module__ or getattr(owner, "__module__", ""))
            return ["builtin", name] if is_known else self._other(value, f"the function {name}")
        self.functions.append(value)
        place = place_of(value) or self._other(value, f"the function {name}")
        inner = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty one
                inner.append(cell.cell_contents)
        return ["function", place, *(self.value(part, depth + 1) for part in inner if part is not value)]

    def _other(self, value: Any, what: str) -> str:
        if self._is_strict:
            raise refused(what)
        self.objects.append(value)
        return what

    def _array(self, array: np.generic | np.ndarray[Any, Any]) -> Any:
        """All of it, because nothing counts the writes to it."""
        self._elements += array.size
        if self._elements > MAX_ELEMENTS or array.dtype.kind not in "biufcSUmM" or array.dtype.char in "gG":
            return self._other(array, f"an array of {array.dtype}, or more than {MAX_ELEMENTS} elements of one model")
        return ["array", xxhash.xxh3_128_hexdigest(array.tobytes()), str(array.dtype), list(array.shape)]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def tensors_beside(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """What a quantised parameter keeps as attributes: its scales and codes, as bitsandbytes has them."""
    holders: list[tuple[str, Any]] = [("", tensor)]
    for prefix, holder in holders:
        for key, value in vars(holder).items():
            if isinstance(value, torch.Tensor):
                yield prefix + key, value
            elif key in _STATES and value is not None:
                holders.append((f"{prefix}{key}.", value))
