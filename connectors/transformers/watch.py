"""Names what a transformers model computes right now; checked before every use, since models can be modified.

Everything that can change is checked where it cannot be bypassed:

- tensors: which objects they are, address, PyTorch's count of writes, and a sample of the bytes (`sample`). Writes
  through `.data` or in inference mode move none of the others;
- modules: their types and attributes (the scale of a LoRA, an epsilon), configs and hooks (`values`), and which of them
  are shared or have tied weights;
- code: methods of classes and the functions that these call (`code`);
- training mode, and autocast: under these a call goes without the cache;
- PyTorch's default dtype.

Without a `model_id` a name has to say all of this: weights are hashed, again when they have changed, and a model with
code that is not of a package whose version is part of the name is refused. A `model_id` names weights and code. When
they are then exchanged, the model gets a name that no other process has. What is inside of objects and functions of
others is not looked at: their author declares changes by `weights_changed`.

A name says what a model computes, and not that K and V of a prefix depend on nothing else. That was tried when the
cache was made, and is tried again before a model is named that differs in more than its tensors: a config can make its
attention look ahead.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import xxhash
from torch.nn.modules import module as torch_modules

from tiercache.connectors.weights.sample import WeightSample
from tiercache.errors import ModelRefused
from tiercache.ground import forks
from tiercache.ground.uninterrupted import whole
from tiercache.protocol.keys import content_id, salted_root
from tiercache.protocol.messages import KEY_BYTES
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .code import Code, Same
from .model import constant_rope_tokens
from .packages import version_of
from .values import Values, tensors_beside

logger = logging.getLogger("tiercache.connectors.transformers")


MAX_TRIALS = 64
"""Of one model. One that every call changes would be tried in every call."""
MAX_TRIED = 8
"""Results of trials that are kept: a model may be switched to and fro."""


class _Parts(NamedTuple):
    """Modules and tensors of a model, each under its first name."""

    modules: dict[str, torch.nn.Module]
    tensors: list[tuple[str, torch.Tensor]]
    aliases: list[tuple[str, str]]
    """Further names, and the first one. What is below a module is not listed again."""
    beside: list[tuple[str, torch.Tensor]]
    """Tensors that are plain attributes."""


_REGISTERED = (
    (ALL_ATTENTION_FUNCTIONS, "_attn_implementation"),
    (ALL_MASK_ATTENTION_FUNCTIONS, "_attn_implementation"),
    (ALL_EXPERTS_FUNCTIONS, "_experts_implementation"),
)
"""Tables of functions, and the attribute of a config that says which of them is used."""


class _Tensors:
    """Some tensors as they were; equal to those that nobody has replaced or, as far as can be seen, written.

    An address does not tell tensors apart: the next one may be put where one was freed.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensors: list[tuple[str, torch.Tensor]], sample: bytes) -> None:
        # Accelerate's offload puts in another one without bytes after each call.
        self._which = [None if tensor.is_meta else weakref.ref(tensor) for _, tensor in tensors]
        self._seen = [(_address(tensor), _writes(tensor)) for _, tensor in tensors], sample

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Tensors) or self._seen != other._seen:
            return False
        for one, same in zip(self._which, other._which, strict=True):
            if one is not same and (one is None or same is None or one() is None or one() is not same()):
                return False
        return True


class _Look(NamedTuple):
    """A snapshot of a model. Two equal snapshots compute the same."""

    form: list[tuple[torch.dtype, torch.device]]  # of each tensor
    tensors: _Tensors
    beside: _Tensors  # those that are attributes
    values: list[Any]  # config and attributes, in a form that is the same in every process
    aliases: list[tuple[str, str]]
    objects: Same  # attributes that only a `model_id` names
    code: Code
    autocast: list[tuple[str, torch.dtype]]
    default_dtype: torch.dtype  # which the `forward` of some models makes tensors of

    def without_tensors(self) -> list[Any]:
        """What decides whether the model can be served. Of tensors only their types and devices."""
        modes = [self.autocast, self.default_dtype]
        return [self.form, self.values, self.aliases, self.objects, self.code.then, *modes]


class _Trial(NamedTuple):
    """What was tried, and why the model cannot be served so, or nothing."""

    of: list[Any]
    refusal: str


def _parts(model: Any) -> _Parts:
    """All modules, and all parameters, with their scales, and buffers.

    Leaves out the frequencies that a long RoPE replaces as it goes. They are made of the config and of others, which
    stay: `original_inv_freq`.
    """
    long_ropes = _long_ropes(model.config)
    found = _Parts({}, [], [], [])
    first: dict[int, str] = {}
    left: list[tuple[str, Any]] = [("", model)]
    while left:
        name, module = left.pop()
        if (known := first.setdefault(id(module), name)) != name:
            found.aliases.append((name, known))
            continue
        found.modules[name] = module
        dot = f"{name}." if name else ""
        own = vars(module)
        if "_parameters" not in own:
            raise ModelRefused(f"{name or 'the model'} is of {type(module).__name__}, whose parts cannot be seen")
        for key, tensor in (*own["_parameters"].items(), *own["_buffers"].items()):
            if tensor is None or key in _exchanged(own, long_ropes):
                continue
            if (known := first.setdefault(id(tensor), dot + key)) != dot + key:
                found.aliases.append((dot + key, known))
                continue
            found.tensors.append((dot + key, tensor))
            found.tensors.extend((f"{dot}{key}.{part}", beside) for part, beside in tensors_beside(tensor))
        left.extend((dot + key, child) for key, child in reversed(own["_modules"].items()) if child is not None)
    return found


def _long_ropes(config: Any) -> list[str]:
    """What the names of the buffers of a long RoPE begin with: nothing, or a kind of layer."""
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = {"": rope, **{f"{kind}_": one for kind, one in rope.items() if isinstance(one, dict)}}
    return [begin for begin, one in kinds.items() if one.get("rope_type") == "longrope"]


def _exchanged(own: dict[str, Any], long_ropes: list[str]) -> set[str]:
    """The buffers of a module that its long RoPE replaces. Of no module that lacks the ones they are made of."""
    found = set()
    for begin in long_ropes:
        if (name := f"{begin}original_inv_freq") in own or name in own["_buffers"]:
            found |= {f"{begin}inv_freq", f"{begin}long_inv_freq"}
    return found


def _has_kept_casts(tensors: list[tuple[str, torch.Tensor]]) -> bool:
    """True if autocast may compute with a tensor as it was earlier in the same region.

    PyTorch keeps casts of float32 leaves that require grad, under `no_grad` too, but not in inference mode.
    """
    if not torch.is_autocast_cache_enabled() or torch.is_inference_mode_enabled():
        return False
    return any(one.requires_grad and one.is_leaf and one.dtype == torch.float32 for _, one in tensors)


def _configs(config: Any) -> dict[str, Any]:
    """The config of a model, and those of its parts."""
    parts = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", ())}
    return {"config": config, **{name: part for name, part in parts.items() if part is not None}}


def _registered_for(configs: Iterable[Any]) -> list[Any]:
    """The functions registered for the kinds of attention, masks and experts that configs name."""
    configs, found = list(configs), []
    for table, field in _REGISTERED:
        kinds = sorted({str(getattr(config, field, None)) for config in configs})
        found += [table.get(kind) for kind in kinds]
    return found


def _hash_tensors(tensors: list[tuple[str, torch.Tensor]], remedy: str) -> str:
    """A hash of names, types, shapes and bytes, read at memory speed. Raises ModelRefused if they cannot be."""
    digest = xxhash.xxh3_128()
    for name, tensor in tensors:
        digest.update(f"{name} {type(tensor).__name__} {tensor.dtype} {list(tensor.shape)} ".encode())
        try:
            if tensor.is_quantized:
                raise TypeError("its bytes are not all of it")
            content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise ModelRefused(f"the bytes of {name} cannot be read: {remedy}") from error
        digest.update(content.data)
    return str(digest.hexdigest())


class ModelWatch:
    """Names what one model computes. Thread-safe as far as the model is.

    Args:
        model: in evaluation mode.
        model_id: identifies its weights, and the code that no package's version names; empty to hash the weights.
        salt: secret of a tenant.

    Attributes:
        content: the `content_id` of what computes, as of the last `root`.
        limit: up to how many tokens the K of a token is independent of the length of its sequence.
        changes: how often something was found that is not as before, even where the name is the same.
        on_change: called after the name has changed.
        try_again: called before the model is named, if it differs in more than its tensors from when it was given or
            tried. It runs the model, and raises ModelRefused for one that cannot be served.
    """

    def __init__(self, model: Any, model_id: str, salt: str) -> None:
        self.content = b""
        self.limit = 0
        self.changes = 0
        self.on_change: Callable[[], None] = lambda: None
        self.try_again: Callable[[], None] = lambda: None
        self._model = model
        self._model_id = model_id
        self._salt = salt
        self._sample = WeightSample()
        self._lock = threading.RLock()  # a trial runs the model, whose hooks may ask for its name
        forks.watch(self, "_lock")
        self._is_trying = False
        self._trials = 0
        self._tried: deque[_Trial] = deque(maxlen=MAX_TRIED)
        self._form: list[tuple[torch.dtype, torch.device]] = []
        self._named: _Look | None = None  # what `_weights` names
        self._last: _Look | None = None
        self._weights = ""
        self._root = b""
        self._private = ""
        self._code: Code | None = None
        self._said: set[str] = set()
        self.root()

    @whole  # a signal handler may call weights_changed, and must not wait for a lock of its own thread
    def root(self) -> bytes:
        """The root of all chains of what the model computes now.

        Costs some microseconds per tensor and module, a hash of all weights when any has changed, and a trial when
        anything else has. Raises ModelRefused for a model that cannot be served as it is; the text says why.
        """
        with self._lock:
            if self._is_trying:
                raise ModelRefused("the model is being tried: it has no name yet")
            try:
                parts = _parts(self._model)
                look = self._look(parts)
                if look == self._last:
                    return self._root
                self._try(look.without_tensors())
                self.limit = constant_rope_tokens(self._model.config)
                self._name(look, parts)
            except Exception as error:
                self.changes += 1  # what is computed meanwhile has no name
                if isinstance(error, ModelRefused):
                    raise
                raise ModelRefused(f"the model cannot be read: {type(error).__name__}: {error}") from error
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
                self._model_id, self._named, self._code, self._private = model_id, None, None, ""
            else:
                self._private = os.urandom(KEY_BYTES).hex()
                self._say("weights_changed() was called without a model_id")
            self._weights, self._last = "", None
            self._tried.clear()
            self._trials = 0

    # --- what is seen

    def _look(self, parts: _Parts) -> _Look:
        """Raises ModelRefused for modes in which K and V differ from normal use, and for what has no name."""
        for name, module in parts.modules.items():
            if module.training:
                what = f"{name} is" if name else "the model is"
                raise ModelRefused(f"{what} in training mode, with dropout: call model.eval() first")
        devices = sorted({tensor.device.type for _, tensor in parts.tensors} - {"meta"})
        autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in devices if torch.is_autocast_enabled(kind)]
        if self._named is not None and autocast != self._named.autocast:
            raise ModelRefused("autocast is on, or another than when the cache was made: make the cache under it too")
        if not self._model_id and getattr(self._model, "peft_config", None):
            raise ModelRefused("the model has adapters: merge them, or pass model_id= that names model and adapter")
        taken = self._sample.take(parts.tensors)
        values, described = self._read(parts)
        parts.beside.extend(values.tensors)
        if autocast and _has_kept_casts([*parts.tensors, *values.tensors]):
            what = "autocast keeps casts of the weights, so that a change to these shows late"
            raise ModelRefused(f"{what}: call torch.autocast(..., cache_enabled=False), or model.requires_grad_(False)")
        return _Look(
            [(tensor.dtype, tensor.device) for _, tensor in parts.tensors],
            _Tensors(parts.tensors, taken.digest()),
            _Tensors(values.tensors, self._sample.take(values.tensors).digest()),
            described,
            parts.aliases,
            Same(values.objects),
            self._code_of(parts, values),
            autocast,
            torch.get_default_dtype(),
        )

    def _read(self, parts: _Parts) -> tuple[Values, list[Any]]:
        """The attributes of all modules, the configs, the classes of tensors, and the hooks of all modules."""
        named = [*parts.modules.items(), *_configs(self._model.config).items()]
        values = Values({id(part): name for name, part in named}, is_strict=not self._model_id)
        described: list[Any] = [values.part(name, part) for name, part in named]
        described += map(values.tensor_class, dict.fromkeys(type(tensor) for _, tensor in parts.tensors))
        for hooks in (torch_modules._global_forward_pre_hooks, torch_modules._global_forward_hooks):
            described.append(values.hooks(hooks.values()))
        return values, described

    def _code_of(self, parts: _Parts, values: Values) -> Code:
        """What was found before, if nothing of it has changed."""
        kinds: dict[type, str] = {}
        for name, module in parts.modules.items():
            kinds.setdefault(type(module), name or "the model")
        configs = _configs(self._model.config)
        kinds |= {type(config): name for name, config in configs.items()}
        kinds |= dict.fromkeys((DynamicCache, DynamicLayer, DynamicSlidingWindowLayer), "its cache")
        of_parts = (vars(module).get("config") for module in parts.modules.values())
        functions = [*_registered_for((*configs.values(), *of_parts)), *values.functions]
        if self._code is None or not self._code.is_of(kinds, functions):
            self._code = Code(kinds, functions, is_strict=not self._model_id)
        return self._code

    # --- whether it can be served

    def _try(self, found: list[Any]) -> None:
        """Raises ModelRefused if a trial of what was found, now or before, says that it cannot be served."""
        trial = next((trial for trial in self._tried if trial.of == found), None)
        if trial is None:
            if self._trials > MAX_TRIALS:
                raise ModelRefused(f"its config, attributes or code have changed {MAX_TRIALS} times: make a new cache")
            self._trials += 1
            trial = _Trial(found, self._refusal())
            self._tried.append(trial)
        if trial.refusal:
            raise ModelRefused(trial.refusal)

    def _refusal(self) -> str:
        """Why the model cannot be served, or nothing. Raises ModelRefused if it cannot be tried just now."""
        self._is_trying = True
        try:
            self.try_again()
        except ModelRefused as error:
            if error.__cause__ is not None:  # such as too little memory
                raise
            return str(error)
        finally:
            self._is_trying = False
        return ""

    # --- what it is called

    def _name(self, look: _Look, parts: _Parts) -> None:
        """Raises ModelRefused if the weights do not determine what is computed."""
        self._form = self._form or look.form
        if look.form != self._form:
            raise ModelRefused("its tensors are others now, or of another type, or elsewhere: make a new cache")
        before = self._last or look
        written = look.tensors != before.tensors
        if not self._weights or written:
            if self._model_id and written:
                self._private = os.urandom(KEY_BYTES).hex()
                self._say("its weights have changed, so that model_id no longer names them")
            self._weights = self._model_id or _hash_tensors(parts.tensors, "pass model_id= to name the weights")
        self._named = self._named or look
        beside = _hash_tensors(parts.beside, "an attribute of a module has to be a plain tensor; buffers need not")
        facts = json.dumps([look.values, beside, look.aliases, look.code.texts], sort_keys=True)
        extra = [("modules", xxhash.xxh3_128_hexdigest(facts.encode())), ("autocast", str(look.autocast or ""))]
        extra.append(("default dtype", str(look.default_dtype)))
        extra += [(package, version_of(package)) for package in ("torch", "transformers")]
        if self._model_id and (look.objects, look.code.then) != (self._named.objects, self._named.code.then):
            extra.append(("state", os.urandom(KEY_BYTES).hex()))
            self._say("code or objects of it are others than those that model_id named")
        if self._private:
            extra.append(("state", self._private))
        self.content = content_id(self._weights, extra=extra)
        self._root = salted_root(self.content, self._salt)

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("what the model computes gets a name that only this process has: %s", what)


def _writes(tensor: torch.Tensor) -> int:
    """How many writes to it PyTorch has counted."""
    return 0 if tensor.is_inference() else tensor._version


def _address(tensor: torch.Tensor) -> int:
    with contextlib.suppress(RuntimeError, NotImplementedError):  # some quantised ones have none
        return tensor.data_ptr()
    return id(tensor)
