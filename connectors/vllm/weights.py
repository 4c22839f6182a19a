"""Detects changes of a rank's weights, which its blocks are named by.

Trainers write new weights into a running vLLM (`reload_weights`, `update_weights`, functions of their own through
`collective_rpc`), and need not tell its connectors. So each rank looks at a sample of its weights (`weights/sample.py`)
before a step that loads or stores:

    look ─ the step's loads and stores ─ the step ─ result of the look: as before, or the weights have moved

If the weights have moved, everything begun since the last unchanged look is void: loads are computed instead, stores
are not committed. The scheduler is told, gives all blocks new names, and says so in its next orders; orders that do not
are not carried out. Nothing waits for a device: the result of a look is read later.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from tiercache.connectors.weights.sample import Taken, WeightSample
from tiercache.errors import ModelRefused

from .callers import locals_of_callers

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

        With `adopt` they are from here on: all names have been given again.
        """
        look = Look(self._sample.take(self._tensors()))
        if adopt:
            self._looks.clear()
            self._named = look
            return lambda: True
        named = self._named
        self._looks.append(look)
        self.settle()
        return lambda: look.digest() == named.digest()

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
    rotary embeddings in the first step. `built` describes them.
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
        self._places, self._tensors, seen = [], [], set[int]()
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
