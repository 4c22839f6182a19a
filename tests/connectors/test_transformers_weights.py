"""Models that are written to, switched over and hooked into while a cache is in front of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_transformers_cache import Open, greedy, prompt
from tiny_models import tiny_model

from tiercache.connectors.transformers_cache import PrefixCache
from tiercache.connectors.weight_sample import ELEMENTS, WeightSample, elements, lattice
from tiercache.errors import ModelRefused

pytestmark = pytest.mark.engine
IDS = prompt(100)
BLOCKS = 6


def restored_blocks(cache: PrefixCache) -> int:
    return int(cache.restore(IDS).get_seq_length()) // 16


def copy_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter.detach() * 1.1)


def add_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data += 0.1


def replace_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.detach() * 1.1


def write_in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.mul_(1.1)


def merge_one(model: Any) -> None:
    """As of a LoRA of rank 1 into a single matrix."""
    weight = model.model.layers[1].self_attn.v_proj.weight
    weight.data += torch.outer(torch.ones(weight.shape[0]), torch.linspace(0.1, 1, weight.shape[1]))


def write_a_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq.data *= 0.5


@pytest.mark.parametrize(
    "update", [copy_data, add_data, replace_data, write_in_inference_mode, merge_one, write_a_buffer]
)
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
    """Nothing that was computed then is stored, under whatever name."""
    model = tiny_model("LlamaConfig")
    cache = open_cache(model)

    def update(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == IDS.shape[1] + 2:
            copy_data(model)
        return scores

    greedy(cache, IDS, logits_processor=[update])
    assert cache.connector.counters["stored_blocks"] == 0
    assert restored_blocks(cache) == 0


def test_weights_that_model_id_named_get_a_name_of_their_own(
    open_cache: Open, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("LlamaConfig")
    cache, other = open_cache(model, model_id="v1"), open_cache(tiny_model("LlamaConfig"), model_id="v1")
    greedy(cache, IDS)
    assert restored_blocks(other) == BLOCKS
    with caplog.at_level(logging.WARNING):
        copy_data(model)
        assert restored_blocks(cache) == 0
    assert "model_id no longer names them" in caplog.text
    greedy(cache, IDS)
    assert restored_blocks(cache) == BLOCKS
    cache.weights_changed("v2")
    assert restored_blocks(cache) == 0
    greedy(cache, IDS)
    assert restored_blocks(open_cache(model, model_id="v2")) == BLOCKS
    cache.weights_changed()
    assert restored_blocks(cache) == 0


def test_a_change_that_no_sample_sees_can_be_told(open_cache: Open) -> None:
    model = tiny_model("LlamaConfig", vocab_size=4096)
    rows = model.model.embed_tokens.weight
    seen = elements(torch.arange(rows.numel()).reshape(rows.shape))
    assert seen is not None
    unseen = next(row for row in range(3, 128) if not ((seen // rows.shape[1]) == row).any())
    ids = torch.full((1, 40), unseen)
    cache = open_cache(model)
    greedy(cache, ids)
    rows.data[unseen] *= 2
    assert cache.restore(ids).get_seq_length() == 32, "the test has found no such change"
    cache.weights_changed()
    assert cache.restore(ids).get_seq_length() == 0
    assert greedy(cache, ids) == greedy(model, ids)


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


@pytest.mark.parametrize(
    "switch",
    [
        lambda model: attribute(model.model.layers[1].self_attn, "scaling", 0.5),
        lambda model: attribute(model.model.layers[1].mlp, "scaling", {"default": 2.0}),
        lambda model: attribute(model.config, "_attn_implementation", "eager"),
        lambda model: attribute(model.config, "rope_parameters", {"rope_type": "linear", "factor": 2.0}),
        lambda model: hook(model.model.layers[0].mlp),
        lambda model: other_forward(model.model.layers[0].mlp),
    ],
    ids=["attribute", "scale of an adapter", "attention", "RoPE", "hook", "forward"],
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


def test_hooks_need_a_name(open_cache: Open) -> None:
    model = tiny_model("LlamaConfig")
    with hook(model.model.layers[0].mlp):
        with pytest.raises(ModelRefused, match=r"model.layers.0.mlp has hooks .* pass model_id="):
            open_cache(model)
        cache = open_cache(model, model_id="steered")
        assert greedy(cache, IDS) == greedy(model, IDS)
        assert restored_blocks(cache) == BLOCKS


def test_a_rope_that_cannot_be_served_is_noticed(open_cache: Open) -> None:
    model = tiny_model("LlamaConfig")
    cache = open_cache(model)
    greedy(cache, IDS)
    with attribute(model.config, "rope_parameters", {"rope_type": "dynamic", "factor": 2.0}):
        assert greedy(cache, IDS) == greedy(model, IDS)
        assert cache.bypassed == 1
    assert restored_blocks(cache) == BLOCKS


def test_autocast_is_another_arithmetic(open_cache: Open) -> None:
    model = tiny_model("LlamaConfig")
    cache = open_cache(model)
    greedy(cache, IDS)
    with torch.autocast("cpu", torch.bfloat16):
        greedy(cache, IDS)
        assert cache.bypassed == 1
        under = open_cache(model)
        assert restored_blocks(under) == 0
        greedy(under, IDS)
        assert restored_blocks(under) == BLOCKS
    assert restored_blocks(under) == 0
    assert restored_blocks(cache) == BLOCKS


def test_a_model_of_another_type_is_left_alone(open_cache: Open) -> None:
    model = tiny_model("LlamaConfig")
    cache = open_cache(model)
    greedy(cache, IDS)
    model.double()
    assert greedy(cache, IDS) == greedy(model, IDS)
    assert cache.bypassed == 1
    model.float()
    assert restored_blocks(cache) == BLOCKS


# --- samples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4096, 4096), (1000, 64), (64, 1000), (11008, 4096), (32000, 128), (7,), (5000,)])
def test_a_sample_is_spread_over_the_whole_of_a_tensor(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.tensor(shape).prod().item()).reshape(shape)
    places = elements(tensor)
    assert places is not None
    count, _ = lattice(shape)
    assert len(places.unique()) == count >= min(ELEMENTS, tensor.numel())
    assert count <= 4 * ELEMENTS
    for part in range(8):  # each eighth of the rows, and of the columns
        assert (places * 8 // tensor.numel() == part).sum().item() >= count // 16
        if len(shape) == 2:
            assert ((places % shape[1]) * 8 // shape[1] == part).sum().item() >= count // 24


def test_each_expert_is_in_a_sample() -> None:
    tensor = torch.arange(128 * 96 * 64).reshape(128, 96, 64)
    places = elements(tensor)
    assert places is not None
    assert torch.bincount(places // (96 * 64)).min() >= 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.complex128])
@pytest.mark.parametrize("keep_views", [False, True])
def test_what_is_written_changes_a_sample(dtype: torch.dtype, keep_views: bool) -> None:
    first = torch.ones(600, 50).to(dtype)
    turned, sliced = torch.ones(50, 600).to(dtype).t(), torch.ones(100, 60).to(dtype)[:, 3:40]
    tensors = [("first", first), ("turned", turned), ("sliced", sliced), ("empty", torch.ones(0).to(dtype))]
    sample = WeightSample(keep_views=keep_views)
    digests = [sample.take(tensors).digest()]
    assert sample.take(tensors).digest() == digests[0]
    for tensor in (first, turned, sliced):
        tensor.data.copy_(torch.zeros(tensor.shape).to(dtype))
        digests.append(sample.take(tensors).digest())
    first.data = torch.ones(600, 50).to(dtype)
    digests.append(sample.take(tensors).digest())
    assert len(set(digests)) == 5
    assert not sample.unread


def test_a_tensor_without_bytes_is_named() -> None:
    sample = WeightSample()
    sample.take([("here", torch.ones(4)), ("nowhere", torch.ones(4, device="meta"))])
    assert sample.unread == ["nowhere"]
