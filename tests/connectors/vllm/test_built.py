"""What changes K and V without changing weights or config: it is in the form of every block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tiercache.connectors.vllm.built import describe_built
from tiercache.connectors.vllm.weights import models_of, unwrapped


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
