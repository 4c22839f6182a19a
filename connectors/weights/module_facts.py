"""What a module computes with besides its parameters and buffers: its attributes, in a form that can be compared and
hashed, and the functions among them.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
import xxhash

from .code_facts import code_text
from .sample import elements, plain_tensors

_OF_TORCH = frozenset({*vars(torch.nn.Module()), "_compiled_call_impl"})
_IGNORED = _OF_TORCH | {
    "_is_hf_initialized",
    "gradient_checkpointing",
    "_gradient_checkpointing_func",
    "_require_grads_hook",
    "_require_grads_hooks",
    "name_or_path",
    "loss_type",
    "_loss_function",
    "forward",
    "hf_device_map",
    "warnings_issued",
    "generation_config",
    "_tp_plan",
    "_ep_plan",
    "_pp_plan",
    "_fsdp_plan",
}
"""What PyTorch keeps in a module, what has no effect, and what is checked elsewhere."""
_PLAIN = frozenset({bool, int, float, str, bytes, complex, type(None)})
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
_CLOSED = frozenset(
    {"torch", "transformers", "accelerate", "peft", "bitsandbytes", "tiercache", *sys.stdlib_module_names}
)
"""Packages whose objects hold much that does not matter, or whole models: they are described by their class."""
_DEEPEST = 4
_STATES = ("quant_state", "state2")
"""Attributes of bitsandbytes parameters that hold further tensors."""


def attributes_of(
    module: torch.nn.Module, configs: Sequence[Any] = (), names: Mapping[int, str] | None = None, whole: bool = False
) -> dict[str, Any]:
    """A module's class and attributes, as JSON can hold them and equal in every process.

    Leaves out `configs`, which are checked elsewhere, and the modules of the model, of which `names` has the names by
    their ids. Tensors are represented by their sample (`weights/sample.py`) unless they are wanted `whole`; objects of
    packages that keep much in them by their class.
    """
    how = _How(names or {}, whole)
    kind = type(module)
    values = {
        key: _value(value, 0, how)
        for key, value in vars(module).items()
        if key not in _IGNORED and not (key == "config" and any(value is config for config in configs))
    }
    found = {"": f"{kind.__module__}.{kind.__qualname__}", **values}
    if kind.__module__.partition(".")[0] not in _CLOSED:  # several classes that a function made have one name
        found["()"] = _value(kind.forward, 0, how)
    return found


def writes_of(module: torch.nn.Module) -> list[int]:
    """How often PyTorch has counted a write to each tensor that a module has as a plain attribute."""
    tensors = (value for key, value in vars(module).items() if key not in _IGNORED and isinstance(value, torch.Tensor))
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def functions_of(module: torch.nn.Module) -> list[Any]:
    """The functions that a module has as attributes, including replaced methods."""
    return [value for key, value in vars(module).items() if key not in _IGNORED and isinstance(value, _FUNCTIONS)]


class _How(NamedTuple):
    names: Mapping[int, str]
    whole: bool


def _value(value: Any, depth: int, how: _How) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value if kind in (bool, int, str, type(None)) else repr(value)
    if isinstance(value, torch.Tensor):
        return _whole_tensor(value) if how.whole else _tensor(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return _array(value)
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, enum.Enum):
        return [name, value.name]
    if isinstance(value, (int, float, str)):  # of a class of somebody's
        return [name, next(repr(base(value)) for base in (int, float, str) if isinstance(value, base))]
    if isinstance(value, types.FunctionType):
        cells = [_cell(cell, depth, how) for cell in value.__closure__ or ()] if depth < _DEEPEST else []
        return [*code_text(value), cells]
    if depth < _DEEPEST:
        inner = functools.partial(_value, depth=depth + 1, how=how)
        if isinstance(value, Mapping):
            items = sorted(([repr(key), inner(item)] for key, item in value.items()), key=repr)
            made = getattr(value, "default_factory", None)
            return items if kind is dict else [name, items, None if made is None else inner(made)]
        if isinstance(value, (list, tuple, deque)):
            items = list(map(inner, value))
            return items if kind in (list, tuple) else [name, items]
        if isinstance(value, (set, frozenset)):
            return sorted(repr(inner(item)) for item in value)
        if kind is functools.partial:
            return [inner(part) for part in (value.func, value.args, value.keywords)]
        if isinstance(value, torch.nn.Module):  # in a container, where PyTorch does not see it
            known = how.names.get(id(value))
            return [name, known] if known is not None else _value_of_module(value, depth + 1, how)
        if isinstance(value, transformers.PretrainedConfig):
            return [name, inner({**value.to_dict(), "_name_or_path": "", "transformers_version": ""})]
        if _is_open(kind) and (content := _content(value)) is not None:
            return [name, inner(content)]
    if isinstance(value, _FUNCTIONS) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return name


def _cell(cell: types.CellType, depth: int, how: _How) -> Any:
    try:
        return _value(cell.cell_contents, depth + 1, how)
    except ValueError:  # it is empty
        return None


def _is_open(kind: type) -> bool:
    """True for objects whose attributes are looked at."""
    return kind in (types.SimpleNamespace, argparse.Namespace) or kind.__module__.partition(".")[0] not in _CLOSED


def _content(value: Any) -> dict[str, Any] | None:
    """The attributes of an object; None if it has none."""
    slots: list[str] = []
    for part in type(value).__mro__:
        own = vars(part).get("__slots__", ())
        slots += [own] if isinstance(own, str) else [name for name in own if isinstance(name, str)]
    if not hasattr(value, "__dict__") and not slots:
        return None
    return {**{name: getattr(value, name) for name in slots if hasattr(value, name)}, **getattr(value, "__dict__", {})}


def _value_of_module(module: torch.nn.Module, depth: int, how: _How) -> Any:
    """Of a module that is not the model's: all that is below it, too."""
    found = []
    for name, part in module.named_modules():
        if id(part) in how.names:
            continue
        kind = type(part)
        own = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        values = [[key, _value(value, depth, how)] for key, value in vars(part).items() if key not in _IGNORED]
        values += [[key, _whole_tensor(tensor) if how.whole else _tensor(tensor)] for key, tensor in own]
        found.append([name, f"{kind.__module__}.{kind.__qualname__}", sorted(values, key=repr)])
    return found


def _whole_tensor(tensor: torch.Tensor) -> list[Any]:
    digest = xxhash.xxh3_128()
    try:
        for plain in plain_tensors(tensor):
            digest.update(plain.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    except (RuntimeError, NotImplementedError, TypeError):
        return ["unread", str(tensor.dtype), list(tensor.shape)]
    return [digest.hexdigest(), str(tensor.dtype), list(tensor.shape)]


def _array(array: np.generic | np.ndarray[Any, Any]) -> list[Any]:
    """As a tensor if PyTorch accepts it. Else whole: with negative strides, in the other byte order, no numbers."""
    is_number = array.dtype.kind in "biufc"
    if is_number:
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            return _tensor(torch.as_tensor(array))
    # Long doubles contain padding bytes that differ in each process: these are read as text.
    is_dense = is_number and array.dtype.char not in "gG"
    content = np.ascontiguousarray(array).tobytes() if is_dense else repr(array.tolist()).encode()
    return [xxhash.xxh3_128_hexdigest(content), str(array.dtype), list(array.shape)]


def _tensor(tensor: torch.Tensor) -> list[Any]:
    digest = xxhash.xxh3_128()
    try:
        for plain in plain_tensors(tensor):
            sample = elements(plain)
            digest.update(b"" if sample is None else sample.cpu().numpy().tobytes())
    except (RuntimeError, NotImplementedError, TypeError):
        return ["unread", str(tensor.dtype), list(tensor.shape)]
    return [digest.hexdigest(), str(tensor.dtype), list(tensor.shape)]


def tensors_beside(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """What a quantised parameter keeps as attributes: its scales and codes, as bitsandbytes has them."""
    holders: list[tuple[str, Any]] = [("", tensor)]
    for prefix, holder in holders:
        for key, value in vars(holder).items():
            if isinstance(value, torch.Tensor):
                yield prefix + key, value
            elif key in _STATES and value is not None:
                holders.append((f"{prefix}{key}.", value))
