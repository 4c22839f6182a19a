"""Names what a transformers model computes right now; checked before every use, since models can be modified.

Everything that can change is checked where it cannot be bypassed:

- tensors: address, PyTorch's count of writes, and a sample of the bytes (`sample`). Writes through `.data` or in
  inference mode move neither of the first two;
- modules: their types and attributes (the scale of a LoRA, an epsilon), which are part of the name, and which of them
  are shared or have tied weights;
- code: hooks, methods of classes and the functions that these call (`code_facts`), which are part of the name too, and
  those that PyTorch and transformers apply to all modules;
- the config: the kind of attention, RoPE;
- training mode, and autocast: under these a call goes without the cache.

Weights that have changed are hashed again. A change that no name covers, such as other code or weights that a
`model_id` named, gets a name that no other process has.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
import xxhash
from torch.nn.modules import module as torch_modules

import transformers
from tiercache.connectors.weights.code_facts import CodeFacts, Same
from tiercache.connectors.weights.module_facts import attributes_of, functions_of, tensors_beside, writes_of
from tiercache.connectors.weights.sample import WeightSample
from tiercache.errors import ModelRefused
from tiercache.ground import forks
from tiercache.ground.uninterrupted import whole
from tiercache.protocol.keys import content_id, salted_root
from tiercache.protocol.messages import KEY_BYTES
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .model import constant_rope_tokens

logger = logging.getLogger("tiercache.connectors.transformers")


class _Look(NamedTuple):
    """A snapshot of a model. Two equal snapshots compute the same."""

    form: list[tuple[torch.dtype, torch.device]]  # of each tensor
    tensors: list[tuple[int, int]]
    sample: bytes
    modules: list[tuple[str, dict[str, Any]]]  # their attributes, in a form that is the same in every process
    aliases: list[tuple[str, str]]  # names of what has another one before
    beside: list[list[int]]  # writes to tensors that are plain attributes
    code: list[tuple[str, list[Any]]]  # what they run
    functions: Same  # and what that refers to
    config: str
    autocast: list[tuple[str, torch.dtype]]


def _hooks(module: torch.nn.Module) -> list[Any]:
    """Functions called instead of, before or after the forward of a module's class; transformers' hooks only watch."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    replaced = vars(module).get("forward")
    found = [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("transformers.")]
    return found if replaced is None else [*found, replaced]


def _hooks_of_all() -> list[Any]:
    """Hooks that PyTorch calls for every module."""
    return [*torch_modules._global_forward_hooks.values(), *torch_modules._global_forward_pre_hooks.values()]


def _code(name: str, module: torch.nn.Module) -> tuple[str, list[Any]]:
    kind = type(module)
    return name, [kind, kind.forward, *_hooks(module), *functions_of(module)]


def _code_of_all(config: Any) -> tuple[str, list[Any]]:
    return "all modules", [*_hooks_of_all(), *_attention_of(config)]


def _attention_of(config: Any) -> list[Any]:
    """The functions registered for the kinds of attention that a config names, those that make their masks, and
    PyTorch's own, which people replace.
    """
    kinds = sorted({str(getattr(part, "_attn_implementation", None)) for part in _configs(config)})
    tables = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    registered = [table.get(kind) for table in tables for kind in kinds]
    return [*registered, torch.nn.functional.scaled_dot_product_attention]


def _aliases(model: Any) -> list[tuple[str, str]]:
    """Modules and tensors with several names: each further name, and the first one."""
    first: dict[int, str] = {}
    parts = chain(
        model.named_modules(remove_duplicate=False),
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    )
    return [(name, known) for name, part in parts if (known := first.setdefault(id(part), name)) != name]


def _configs(config: Any) -> list[Any]:
    return [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]


def described(model: Any) -> str:
    """The config, with what a config does not save of how it is computed."""
    config = model.config
    kinds = ("_attn_implementation", "_experts_implementation")
    how = [[str(getattr(part, kind, None)) for kind in kinds] for part in _configs(config)]
    saved = {**config.to_dict(), "_name_or_path": "", "transformers_version": ""}
    return json.dumps([type(model).__name__, saved, how], sort_keys=True, default=str)


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters, with their scales, and buffers.

    Leaves out the frequencies that a long RoPE replaces as it goes, which its config names.
    """
    exchanged = "longrope" in str(getattr(model.config.get_text_config(decoder=True), "rope_parameters", ""))
    for name, parameter in model.named_parameters():
        yield name, parameter
        for part, tensor in tensors_beside(parameter):
            yield f"{name}.{part}", tensor
    for name, buffer in model.named_buffers():
        if not (exchanged and name.endswith("inv_freq")):
            yield name, buffer


def hash_tensors(model: Any) -> str:
    """A hash of names, types, shapes and bytes, read at memory speed. Raises ModelRefused if they cannot be."""
    digest = xxhash.xxh3_128()
    for name, tensor in _tensors(model):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        try:
            content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise ModelRefused(f"the bytes of {name} cannot be read: pass model_id= to name the weights") from error
        digest.update(content.data)
    return str(digest.hexdigest())


class ModelWatch:
    """Names what one model computes. Thread-safe as far as the model is.

    Args:
        model: in evaluation mode.
        model_id: identifies its weights and whatever else it computes with; empty to hash them.
        salt: secret of a tenant.

    Attributes:
        content: the `content_id` of what computes, as of the last `root`.
        limit: up to how many tokens the K of a token is independent of the length of its sequence.
        changes: how often something was found that is not as before, even where the name is the same.
        on_change: called after the name has changed.
    """

    def __init__(self, model: Any, model_id: str, salt: str) -> None:
        self.content = b""
        self.limit = 0
        self.changes = 0
        self.on_change: Callable[[], None] = lambda: None
        self._model = model
        self._model_id = model_id
        self._salt = salt
        self._sample = WeightSample()
        self._lock = threading.Lock()
        forks.watch(self, "_lock")
        self._form: list[tuple[torch.dtype, torch.device]] = []
        self._named: _Look | None = None  # what `_weights` names
        self._last: _Look | None = None
        self._weights = ""
        self._root = b""
        self._private = ""
        self._facts: CodeFacts | None = None
        self._said: set[str] = set()
        self.root()

    @whole  # a signal handler may call weights_changed, and must not wait for a lock of its own thread
    def root(self) -> bytes:
        """The root of all chains of what the model computes now.

        Costs some microseconds per tensor and module, and a hash of all weights when any has changed. Raises
        ModelRefused for a model that cannot be served as it is; the text says why.
        """
        with self._lock:
            self._check_mode()
            look = self._look()
            if look == self._last:
                return self._root
            self.limit = constant_rope_tokens(self._model.config)
            self._name(look)
            self._last = look
            self.changes += 1
        self.on_change()
        return self._root

    @whole
    def weights_changed(self, model_id: str = "") -> None:
        """Discard earlier snapshots and name the model again.

        Without `model_id` the name is one that no other process has: the change need not be visible to any check.
        """
        with self._lock:
            if model_id:
                self._model_id, self._named, self._facts, self._private = model_id, None, None, ""
            else:
                self._private = os.urandom(KEY_BYTES).hex()
                self._say("weights_changed() was called without a model_id")
            self._weights, self._last = "", None

    # --- what is seen

    def _check_mode(self) -> None:
        """Raise ModelRefused for modes in which the K and V differ from normal use."""
        for name, module in self._model.named_modules():
            if module.training:
                what = f"{name} is" if name else "the model is"
                raise ModelRefused(f"{what} in training mode, with dropout: call model.eval() first")
        if self._named is not None and self._autocast() != self._named.autocast:
            raise ModelRefused("autocast is on, or another than when the cache was made: make the cache under it too")

    def _autocast(self) -> list[tuple[str, torch.dtype]]:
        kinds = {tensor.device.type for tensor in self._model.parameters()} - {"meta"}
        return [(kind, torch.get_autocast_dtype(kind)) for kind in sorted(kinds) if torch.is_autocast_enabled(kind)]

    def _look(self) -> _Look:
        named = list(_tensors(self._model))
        taken = self._sample.take(named)
        form = [(tensor.dtype, tensor.device) for _, tensor in named]
        tensors = [(_address(tensor), 0 if tensor.is_inference() else tensor._version) for _, tensor in named]
        named_modules = list(self._model.named_modules())
        configs = _configs(self._model.config)
        names = {id(module): name for name, module in named_modules}
        modules = [(name, attributes_of(module, configs, names)) for name, module in named_modules]
        beside = [writes_of(module) for _, module in named_modules]
        code = [_code_of_all(self._model.config), *(_code(name, module) for name, module in named_modules)]
        if self._facts is None:
            self._facts = CodeFacts({type(module) for _, module in named_modules}, _attention_of(self._model.config))
        run = code, self._facts.now()
        how = described(self._model), self._autocast()
        return _Look(form, tensors, taken.digest(), modules, _aliases(self._model), beside, *run, *how)

    # --- what it is called

    def _name(self, look: _Look) -> None:
        """Raises ModelRefused if the weights do not determine what is computed."""
        if not self._model_id:
            self._check_named(look)
        self._form = self._form or look.form
        if look.form != self._form:
            raise ModelRefused("its tensors are others now, or of another type, or elsewhere: make a new cache")
        before = self._last or look
        written = (look.tensors, look.sample) != (before.tensors, before.sample)
        if not self._weights or written:
            if self._model_id and written:
                self._private = os.urandom(KEY_BYTES).hex()
                self._say("its weights have changed, so that model_id no longer names them")
            self._weights = self._model_id or hash_tensors(self._model)
        self._named = self._named or look
        configs = _configs(self._model.config)
        named_modules = list(self._model.named_modules())
        names = {id(module): name for name, module in named_modules}
        whole_modules = [(name, attributes_of(module, configs, names, whole=True)) for name, module in named_modules]
        assert self._facts is not None
        facts = [whole_modules, look.aliases, self._facts.texts]
        modules = xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())
        version = transformers.__version__  # the code of a model changes with it
        extra = [("config", look.config), ("modules", modules), ("autocast", str(look.autocast or ""))]
        extra.append(("transformers", version))
        if (look.code, look.functions) != (self._named.code, self._named.functions):
            extra.append(("state", os.urandom(KEY_BYTES).hex()))
            self._say(f"the code of {_difference(self._named.code, look.code)} has changed, which nothing names")
        if self._private:
            extra.append(("state", self._private))
        self.content = content_id(self._weights, extra=extra)
        self._root = salted_root(self.content, self._salt)

    def _check_named(self, look: _Look) -> None:
        """Raise ModelRefused if the model is more than its weights and config, and has no name for it."""
        if getattr(self._model, "peft_config", None):
            raise ModelRefused("the model has adapters: merge them, or pass model_id= that names model and adapter")
        if self._named is not None:
            return  # the addition has changed the name
        hooked = [
            name or "the model"
            for name, module in self._model.named_modules()
            if _hooks(module) and not hasattr(module, "_hf_hook")  # Accelerate's only move weights
        ]
        if _hooks_of_all():
            hooked.append("every module")
        if hooked:
            raise ModelRefused(f"{hooked[0]} has hooks that its weights do not name: pass model_id= that does")

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("what the model computes gets a name that only this process has: %s", what)


def _address(tensor: torch.Tensor) -> int:
    with contextlib.suppress(RuntimeError, NotImplementedError):  # some quantised ones have none
        return tensor.data_ptr()
    return id(tensor)


def _difference(before: list[tuple[str, list[Any]]], now: list[tuple[str, list[Any]]]) -> str:
    """The first module that differs."""
    pairs = zip(before, now, strict=False)
    return next((name or "the model" for (name, code), (_, other) in pairs if code != other), "the modules")
