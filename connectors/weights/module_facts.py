"""What a module computes with besides its parameters and buffers: its attributes, in a form that can be compared and
hashed, and the functions among them.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import xxhash

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
    "config",
    "generation_config",
    "_tp_plan",
    "_ep_plan",
    "_pp_plan",
    "_fsdp_plan",
}
"""What PyTorch keeps in a module, what has no effect, and what is checked elsewhere."""
_PLAIN = frozenset({bool, int, float, str, bytes, complex, type(None)})
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
_DEEPEST = 4
_STATES = ("quant_state", "state2")
"""Attributes of bitsandbytes parameters that hold further tensors."""


def attributes_of(module: torch.nn.Module) -> dict[str, Any]:
    """A module's class and attributes, as JSON can hold them and equal in every process.

    Tensors are represented by their sample (`weights/sample.py`), objects of unknown content by their class.
    """
    kind = type(module)
    values = {key: _value(value, 0) for key, value in vars(module).items() if key not in _IGNORED}
    return {"": f"{kind.__module__}.{kind.__qualname__}", **values}


def functions_of(module: torch.nn.Module) -> list[Any]:
    """The functions that a module has as attributes, including replaced methods."""
    return [value for key, value in vars(module).items() if key not in _IGNORED and isinstance(value, _FUNCTIONS)]


def _value(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value if kind in (bool, int, str, type(None)) else repr(value)
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return _array(value)
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if depth < _DEEPEST:
        if kind is dict:
            return sorted([repr(key), _value(item, depth + 1)] for key, item in value.items())
        if kind in (list, tuple):
            return [_value(item, depth + 1) for item in value]
        if kind in (set, frozenset):
            return sorted(repr(_value(item, depth + 1)) for item in value)
        if kind is functools.partial:
            return [_value(part, depth + 1) for part in (value.func, value.args, value.keywords)]
    named = value if isinstance(value, _FUNCTIONS) and hasattr(value, "__qualname__") else kind
    return f"{named.__module__}.{named.__qualname__}"


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
