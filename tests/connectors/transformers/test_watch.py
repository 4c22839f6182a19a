"""Models that are written to, switched over and hooked into while a cache is in front of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_models import Open, greedy, prompt, tiny_model

from tiercache.connectors.transformers_cache import PrefixCache

pytestmark = pytest.mark.engine
IDS = prompt(100)
BLOCKS = 6


def restored_blocks(cache: PrefixCache) -> int:
    return int(cache.restore(IDS).get_seq_length()) // 16


def copy_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter.detach() * 1.1)


def merge_one(model: Any) -> None:
    """A change as that of a LoRA of rank 1, merged into a single matrix."""
    weight = model.model.layers[1].self_attn.v_proj.weight
    weight.data += torch.outer(torch.ones(weight.shape[0]), torch.linspace(0.1, 1, weight.shape[1]))


def write_a_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq.data *= 0.5


@pytest.mark.parametrize("update", [copy_data, merge_one, write_a_buffer])
def test_an_update_that_pytorch_does_not_count_is_noticed(open_cache: Open, update: Callable[[Any], None]) -> None:
    model = tiny_model("LlamaConfig")
    cache = open_cache(model)
    before = greedy(cache, IDS)
    assert restored_blocks(cache) == BLOCKS
    update(model)
    assert restored_blocks(cache) == 0
    assert greedy(cache, IDS) == greedy(model, IDS) != before
    assert restored_blocks(cache) == BLOCKS
    assert restored_blocks(open_cache(tiny_model("LlamaConfig"))) == BLOCKS  # whose weights are as they were


def test_an_update_in_the_middle_of_a_generation_is_noticed(open_cache: Open) -> None:
    """Nothing that was computed during the change is stored, under any name."""
    model = tiny_model("LlamaConfig")
    cache = open_cache(model)

    def update(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == IDS.shape[1] + 2:
            copy_data(model)
        return scores

    greedy(cache, IDS, logits_processor=[update])
    assert cache.connector.counters["stored_blocks"] == 0
    assert restored_blocks(cache) == 0


@pytest.mark.parametrize("part", ["", "model.layers.1.self_attn", "model.embed_tokens"])
def test_in_training_mode_nothing_is_served_or_stored(
    open_cache: Open, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    model = tiny_model("LlamaConfig", attention_dropout=0.3)
    cache = open_cache(model)
    kept = cache.restore(IDS)
    greedy(cache, IDS)
    stored = cache.connector.counters["stored_blocks"]
    model.get_submodule(part).train()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            greedy(cache, prompt(100, seed=1))
    assert cache.bypassed == 2
    assert caplog.text.count("in training mode, with dropout: call model.eval() first") == 1
    assert restored_blocks(cache) == 0
    with torch.no_grad():
        model(input_ids=IDS, past_key_values=kept)
    assert cache.store(kept, IDS) == 0
    assert cache.connector.counters["stored_blocks"] == stored
    model.eval()
    assert restored_blocks(cache) == BLOCKS


@contextmanager
def attribute(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    yield
    setattr(module, name, before)


@contextmanager
def hook(module: Any) -> Iterator[None]:
    handle = module.register_forward_hook(lambda module, inputs, output: output * 1.5)
    yield
    handle.remove()


@contextmanager
def other_forward(module: Any) -> Iterator[None]:
    forward = module.forward
    module.forward = lambda *arguments: forward(*arguments) * 1.5
    yield
    del module.forward


@contextmanager
def forward_of_class(model: Any) -> Iterator[None]:
    kind = type(model.model.norm)
    forward = kind.forward
    with attribute(kind, "forward", lambda self, states: forward(self, states) * 1.5):
        yield


@pytest.mark.parametrize(
    "switch",
    [
        forward_of_class,
        lambda model: attribute(model.model.layers[1].self_attn, "scaling", 0.5),
        lambda model: attribute(model.model.layers[1].mlp, "scaling", {"default": 2.0}),
        lambda model: attribute(model.config, "_attn_implementation", "eager"),
        lambda model: attribute(model.config, "rope_parameters", {"rope_type": "linear", "factor": 2.0}),
        lambda model: hook(model.model.layers[0].mlp),
        lambda model: other_forward(model.model.layers[0].mlp),
    ],
    ids=[
        "class",
        "attribute",
        "scale of an adapter",
        "attention",
        "RoPE",
        "hook",
        "forward",
    ],
)
def test_what_else_decides_the_result_is_part_of_the_name(open_cache: Open, switch: Callable[[Any], Any]) -> None:
    model = tiny_model("LlamaConfig")
    model.model.layers[1].mlp.scaling = {"default": 1.0}  # what PEFT puts into its layers
    cache = open_cache(model)
    before = greedy(cache, IDS)
    with switch(model):
        assert restored_blocks(cache) == 0
        assert greedy(cache, IDS) == greedy(model, IDS)
        assert restored_blocks(cache) == BLOCKS
    assert restored_blocks(cache) == BLOCKS
    assert greedy(cache, IDS) == greedy(model, IDS) == before
