"""How a rank of vLLM detects changes of its weights, without vLLM."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tiercache.connectors.vllm.weights import (
    Look,
    RunnerTensors,
    Weights,
    describe_built,
    models_of,
    runner_of_caller,
    unwrapped,
)
from tiercache.errors import ModelRefused

pytestmark = pytest.mark.engine


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(32, 24)
        self.experts = torch.nn.Parameter(torch.randn(4, 8, 8))
        self.register_buffer("table", torch.randn(40))
        self.register_buffer("angles", torch.randn(40), persistent=False)


class Runner:
    """The parts of vLLM's model runner that the connector looks at."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(Block(), Block())
        self.drafter = SimpleNamespace(model=torch.nn.Linear(8, 8))

    def register(self, connector: Callable[[], Any]) -> Any:
        return connector()


@pytest.fixture
def runner() -> Runner:
    return Runner()


def replaced(module: Any, name: str) -> None:
    setattr(module, name, torch.nn.Parameter(torch.randn_like(getattr(module, name))))


UPDATES: list[Callable[[Runner], Any]] = [
    lambda runner: runner.model[1].linear.weight.data.mul_(1.01),
    lambda runner: runner.model[0].linear.bias.data.add_(1),
    lambda runner: runner.model[0].experts.data[3].mul_(2),
    lambda runner: runner.model[0].table.copy_(torch.randn(40)),
    lambda runner: replaced(runner.model[0].linear, "weight"),
    lambda runner: setattr(runner.model[0], "linear", torch.nn.Linear(32, 24)),
    lambda runner: setattr(runner, "model", torch.nn.Sequential(Block(), Block())),
    lambda runner: runner.drafter.model.weight.data.zero_(),
]


def test_a_table_that_is_in_no_checkpoint_is_not_watched(runner: Runner) -> None:
    """vLLM changes the type of such a table in its first step."""
    weights = Weights(RunnerTensors(runner))
    runner.model[0].angles = runner.model[0].angles.to(torch.bfloat16)
    assert weights.look()()
    assert weights.moves == 0


@pytest.mark.parametrize("update", UPDATES)
def test_every_change_is_seen_once(runner: Runner, update: Callable[[Runner], Any]) -> None:
    weights = Weights(RunnerTensors(runner))
    assert weights.look()()
    assert weights.moves == 0
    update(runner)
    same = weights.look()
    assert not same()
    assert (weights.settle(), weights.moves) == (True, 1)
    assert weights.look()(), "those are the weights now"
    assert not same(), "what was computed before still does not count"
    assert weights.moves == 1


class Experts(torch.nn.Module):
    """As vLLM's layer of them, whose biases and scales move with the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight, self.w13_bias = (torch.nn.Parameter(torch.randn(4, 8, 8)[..., :n].squeeze(-1)) for n in (8, 1))

    def get_expert_weights(self) -> list[torch.Tensor]:
        return [weight.view(4, -1) for weight in self.parameters()]


def test_experts_that_vllm_moves_about_are_left_out(runner: Runner) -> None:
    outer = torch.nn.Sequential(Experts(), torch.nn.Linear(8, 4))  # with the layer that chooses experts
    outer.get_expert_weights = outer[0].get_expert_weights
    runner.model[1].experts_layer = outer
    weights = Weights(RunnerTensors(runner, experts=False))
    runner.model[0].experts.data.zero_()
    for weight in outer[0].parameters():
        weight.data[:] = weight.data.flip(0)
    assert weights.look()()
    outer[1].weight.data.zero_()
    assert not weights.look()()
    runner.model[0].linear.weight.data.zero_()
    assert not weights.look()()


def test_nothing_waits_for_a_device(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result of each look counts once it has arrived, in the order of the looks."""
    arrived = False
    weights = Weights(RunnerTensors(runner))
    monkeypatch.setattr(Look, "known", lambda look: arrived)
    first = weights.look()
    UPDATES[0](runner)
    second = weights.look()
    assert (weights.settle(), weights.moves) == (False, 0)
    assert (first(), second()) == (True, False), "a caller that can wait gets the answer"
    UPDATES[1](runner)
    third = weights.look()
    arrived = True
    assert (weights.settle(), weights.moves) == (True, 2)
    assert not third()
    assert weights.look()()


def test_the_runner_is_found_on_the_stack(runner: Runner) -> None:
    assert runner.register(runner_of_caller) is runner
    with pytest.raises(ModelRefused, match="does not show its weights"):
        runner_of_caller()


class Attention(torch.nn.Module):
    """The parts of vLLM's attention layers that the connector looks at."""

    def __init__(self, k_scale: float = 1.0) -> None:
        super().__init__()
        self._k_scale_float, self._v_scale_float, self.kv_cache_dtype = k_scale, 1.0, "fp8"


class Model(torch.nn.Module):
    """A model's own code, with what it builds."""

    def __init__(self, *parts: torch.nn.Module, tempered: bool = False, factor: float = 1.0, most: int = 8) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(parts)
        self.attn_temperature_tuning, self.factor, self.max_num_tokens = tempered, factor, most
        self.do_not_compile = most == 8
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("made", torch.full((4,), factor), persistent=False)
        self.register_buffer("loaded", torch.rand(4))


@pytest.mark.parametrize(
    "other",
    [
        lambda: Model(Attention(), tempered=True),  # as Llama 4 above 32,768 tokens
        lambda: Model(Attention(), factor=0.5),
        lambda: Model(Attention(k_scale=0.5)),
        lambda: Model(),
    ],
)
def test_what_a_model_has_been_built_with_is_told_apart(other: Callable[[], Model]) -> None:
    assert describe_built([other()]) != describe_built([Model(Attention())])


def test_limits_and_loaded_tensors_are_not_looked_at() -> None:
    """Engines that differ in these share blocks; weights are named by their files."""
    assert describe_built([Model(Attention(), most=16)]) == describe_built([Model(Attention())])
    model = Model(Attention())
    assert describe_built([model, model]) == describe_built([model])


def test_a_model_is_found_in_what_vllm_wraps_it_in() -> None:
    class Wrapper:
        """As the one for CUDA graphs."""

        def __init__(self, runnable: Any) -> None:
            self.runnable = runnable

        def unwrap(self) -> Any:
            return self.runnable

    model, drafts = Model(), Model()
    runner, drafter = Wrapper(None), Wrapper(None)
    runner.model, drafter.model, runner.drafter = Wrapper(model), Wrapper(drafts), drafter  # type: ignore[attr-defined]
    assert models_of(runner) == [model, drafts]
    assert unwrapped(Wrapper(object())) is None
