"""The model that a rank computes with: detects changes of its weights, and describes what was built around them.

Trainers write new weights into a running vLLM (`reload_weights`, `update_weights`, functions of their own through
`collective_rpc`), and need not tell its connectors. So each rank looks at a sample of its weights (`weights/sample.py`)
before a step that loads or stores:

    look ─ the step's loads and stores ─ the step ─ result of the look: as before, or the weights have moved

Weights may be exchanged and be back before the next store. So a rank also looks before a step in which requests begin.

If the weights have moved, everything begun since the last unchanged look is void: loads are computed instead, stores
are not committed. The scheduler is told, gives all blocks new names, and says so in its next orders; orders that do not
are not carried out. Nothing waits for a device: the result of a look is read later.
"""

from __future__ import annotations

import hashlib
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import xxhash

from tiercache.connectors.weights.sample import Taken, WeightSample
from tiercache.errors import ModelRefused

from .compat import locals_of_callers

DRAFTERS = ("drafter", "speculator")
"""Where vLLM's model runners keep the draft model, whose KV is in blocks too."""

Tensors = Callable[[], list[tuple[str, torch.Tensor]]]


class Look:
    """The result of one look, as soon as it is known."""

    def __init__(self, taken: Taken) -> None:
        self._taken: Taken | None = taken
        self._digest = b""

    def known(self) -> bool:
        """True if `digest` answers at once."""
        taken = self._taken
        return taken is None or all(event.query() for event in taken.copied)

    def digest(self) -> bytes:
        """For any thread. Waits for the device's work up to the time of the look."""
        taken = self._taken
        if taken is not None:
            self._digest = taken.digest()
            self._taken = None
        return self._digest


class Weights:
    """The weights of one rank. For the worker's thread.

    Attributes:
        moves: how often they have changed, as far as looks have shown.
    """

    def __init__(self, tensors: Tensors) -> None:
        self.moves = 0
        self._tensors = tensors
        self._sample = WeightSample(keep_views=True)
        self._named = Look(self._sample.take(tensors()))  # what blocks are named by
        self._looks: deque[Look] = deque()  # whose result has not been handled yet

    def look(self, adopt: bool = False) -> Callable[[], bool]:
        """Look at the weights: the returned function tells, in any thread, whether blocks are named by them.

        It is False too if an earlier look, whose result is not known yet, has seen others. With `adopt` they are named
        by these weights from here on: all names have been given again.
        """
        look = Look(self._sample.take(self._tensors()))
        if adopt:
            self._looks.clear()
            self._named = look
            return lambda: True
        named = self._named
        self._looks.append(look)
        looks = [*self._looks]
        self.settle()
        return lambda: all(each.digest() == named.digest() for each in looks)

    def settle(self, wait: bool = False) -> bool:
        """Handle the results of looks; returns whether all are known. With `wait`, wait for the rest."""
        while self._looks and (wait or self._looks[0].known()):
            look = self._looks.popleft()
            if look.digest() != self._named.digest():
                self.moves += 1
                self._named = look
        return not self._looks


def models_of(runner: Any) -> list[torch.nn.Module]:
    """The model of one of vLLM's model runners, and that of its drafts if it has one."""
    drafters = (getattr(runner, name, None) for name in DRAFTERS)
    models = (unwrapped(getattr(owner, "model", None)) for owner in (runner, *drafters))
    return [model for model in models if model is not None]


def unwrapped(model: Any) -> torch.nn.Module | None:
    """A model without vLLM's wrappers for CUDA graphs and micro-batches; None where it is not a model."""
    if not isinstance(model, torch.nn.Module) and callable(getattr(model, "unwrap", None)):
        model = model.unwrap()
    return model if isinstance(model, torch.nn.Module) else None


class RunnerTensors:
    """The parameters and buffers of a vLLM model runner's models, even after modules were replaced.

    Buffers that are in no checkpoint are left out: vLLM itself changes some, as it changes the type of a table of
    rotary embeddings in the first step. `describe_built` describes them.
    """

    def __init__(self, runner: Any, *, experts: bool = True) -> None:
        """`experts`: include those of experts, which are not to be watched where vLLM moves them."""
        self._runner = runner
        self._experts = experts
        self._children: list[Any] = []
        self._places: list[tuple[dict[str, Any], str]] = []  # of children: in the dict of their parent
        self._tensors: list[tuple[str, dict[str, Any], str]] = []
        self._walk()

    def _walk(self) -> None:
        self._roots = models_of(self._runner)
        self._places, self._tensors, seen = [], [], set() if self._experts else _moved(self._roots)
        for model in self._roots:
            for name, module in model.named_modules():
                self._places += [(module._modules, child) for child in module._modules]
                for owner in (module._parameters, module._buffers):
                    for key, tensor in owner.items():
                        if tensor is None or id(tensor) in seen or not (self._experts or tensor.ndim < 3):
                            continue
                        if key in module._non_persistent_buffers_set:
                            continue
                        seen.add(id(tensor))
                        self._tensors.append((f"{name}.{key}", owner, key))
        self._children = [owner[key] for owner, key in self._places]

    def __call__(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors as they are now. Some tens of microseconds, unless modules have been replaced."""
        try:
            if not (
                _same(models_of(self._runner), self._roots) and _same([o[k] for o, k in self._places], self._children)
            ):
                self._walk()
            return [(name, owner[key]) for name, owner, key in self._tensors if owner[key] is not None]
        except KeyError:
            self._walk()
            return [(name, owner[key]) for name, owner, key in self._tensors]


def _moved(models: Iterable[torch.nn.Module]) -> set[int]:
    """The ids of tensors that vLLM moves with experts, of which biases and scales have fewer than three dimensions."""

    def lists(module: torch.nn.Module) -> list[torch.nn.Module]:
        return [each for each in module.modules() if hasattr(each, "get_expert_weights")]

    inner = [layer for model in models for layer in lists(model) if lists(layer) == [layer]]
    return {id(tensor) for layer in inner for tensor in layer.parameters()}


def _same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def weights_stay() -> bool:
    """True if vLLM resets its caches because it goes to sleep at level 1, which keeps the weights.

    vLLM does not tell a connector why it resets it. Where vLLM has to wait for requests first, the cause cannot be
    told: the answer is False.
    """
    return any(
        known.get("level") == 1 and hasattr(known.get("self"), "model_executor") and "clear_prefix_cache" in known
        for known in locals_of_callers()
    )


def runner_of_caller() -> Any:
    """The model runner that is registering its KV caches: vLLM passes a connector the caches and not the model.

    Raises ModelRefused where it is not on the stack.
    """
    for known in locals_of_callers():
        owner = known.get("self")
        if unwrapped(getattr(owner, "model", None)) is not None:
            return owner
    raise ModelRefused("this vLLM does not show its weights, so that a change of them could not be noticed")


# --- what a rank has built around its weights --------------------------------------------------------
#
# vLLM takes some of what affects K and V from neither weights nor config: `max_model_len` decides which factors of
# LongRoPE apply and whether attention is tempered, and the way of loading decides the scales of quantised KV. What is
# described is not those settings but their result in the rank's own modules, whatever it came from:
#
#     code of the model       its classes, their switches and factors, and tensors that are in no checkpoint
#     rotary embeddings       the same and all their numbers, which make tables of sines and cosines
#     attention layers        the scales and the type of their KV
#
# Integers in the code of a model are sizes that follow from its config, ranks, or limits of the engine. They are left
# out: engines that differ in limits share blocks, and ranks with equal blocks have one name for them. Linear layers are
# left out too: they have weights.

ROTARY = "vllm.model_executor.layers.rotary_embedding"
OTHER_CODE = ("torch.", "vllm.model_executor.layers.", "vllm.model_executor.custom_op.", "vllm.lora.")
"""Modules of these packages are not the model's own code."""
RUNS = {
    "compiled",
    "do_not_compile",
    "enable_eplb",
    "evaluate_guards",
    "first_compile",
    "layer_name",
    "layerwise_nvtx_tracing_enabled",
    "prefix",
    "training",
    "was_aot_compile_fn_loaded_from_disk",
}
"""Attributes that say how a model is run, and nothing of what it computes."""
SWITCHES = (bool, float, str)
NUMBERS = (*SWITCHES, int, torch.dtype)
SCALES = ("_k_scale_float", "_v_scale_float", "kv_cache_dtype", "calculate_kv_scales")


def describe_built(models: Iterable[torch.nn.Module]) -> str:
    """A hash of all that. Reads the tables of rotary embeddings, once for each."""
    described = hashlib.blake2b(digest_size=16)
    seen: set[int] = set()
    for model in models:
        for module in model.modules():
            if id(module) in seen:  # one rotary embedding often serves all layers
                continue
            seen.add(id(module))
            for line in _lines(module):
                described.update(line.encode() + b"\n")
    return described.hexdigest()


def _lines(module: torch.nn.Module) -> Iterator[str]:
    """Description of one module."""
    home = f"{type(module).__module__}."
    if home.startswith(ROTARY):
        yield from _state(module, NUMBERS)
    elif hasattr(module, "_k_scale_float"):
        yield repr([(name, getattr(module, name, None)) for name in SCALES])
    elif not home.startswith(OTHER_CODE):
        yield from _state(module, SWITCHES)


def _state(module: torch.nn.Module, kinds: tuple[type, ...]) -> Iterator[str]:
    """The class of a module, its attributes of these kinds, and the tensors that it has made itself."""
    plain = {
        name: value
        for name, value in vars(module).items()
        if name not in RUNS and not name.startswith("_") and _is_plain(value, kinds)
    }
    yield f"{type(module).__module__}.{type(module).__qualname__} {sorted(plain.items())!r}"
    for name in sorted(module._non_persistent_buffers_set):
        tensor = module._buffers.get(name)
        if tensor is not None:
            yield f"{name} {tensor.dtype} {list(tensor.shape)} {_digest(tensor)}"


def _is_plain(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(each, kinds) for each in value)
    if isinstance(value, dict):
        return all(_is_plain(each, kinds) for pair in value.items() for each in pair)
    return isinstance(value, kinds) and (int in kinds or type(value) is not int)


def _digest(tensor: torch.Tensor) -> str:
    if tensor.device.type == "meta" or not tensor.numel():
        return ""
    return xxhash.xxh3_128(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()
