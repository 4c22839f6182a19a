"""Models that are written to, switched over and hooked into while a cache is in front of them."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.utils import get_session
from tiny_models import Open, greedy, prompt, tiny_model

from tiercache.connectors.transformers.watch import ModelWatch
from tiercache.connectors.transformers_cache import PrefixCache
from tiercache.connectors.weights import module_facts

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


_PRINT_ROOT = """
from tiny_models import tiny_model
from tiercache.connectors.transformers.watch import ModelWatch
print(ModelWatch(tiny_model("LlamaConfig"), "", "").root().hex())
"""


def test_a_model_has_one_name_in_all_processes() -> None:
    """Processes share blocks by it: nothing in it may be of one process only, such as the id of its session."""
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    roots = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run([sys.executable, "-c", _PRINT_ROOT], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        roots.add(done.stdout.strip())
    assert roots == {ModelWatch(tiny_model("LlamaConfig"), "", "").root().hex()}


def test_what_other_code_does_with_the_hub_is_no_change_of_the_model(open_cache: Open) -> None:
    cache = open_cache(tiny_model("LlamaConfig"))
    before = greedy(cache, IDS)
    get_session()  # which huggingface_hub keeps in a global, as any request to the Hub does
    assert restored_blocks(cache) == BLOCKS
    assert greedy(cache, IDS) == before


def test_a_parent_that_a_layer_keeps_in_a_list_is_only_named(open_cache: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual way not to register a module: its tensors are not hashed again for each layer."""
    model = tiny_model("LlamaConfig")
    for layer in model.model.layers:
        layer.parents = [model]
    hashed: list[Any] = []
    monkeypatch.setattr(module_facts, "_whole_tensor", hashed.append)
    cache = open_cache(model)
    greedy(cache, IDS)
    assert restored_blocks(cache) == BLOCKS
    assert hashed == []


def closed_over(kind: type, scale: float) -> type:
    return type("Closed", (kind,), {"forward": lambda self, x: kind.forward(self, x) * scale})


def scaled(kind: type, value: float) -> type:
    def forward(self: Any, x: torch.Tensor, *, scale: float = value) -> Any:
        return kind.forward(self, x) * scale

    return type("Scaled", (kind,), {"forward": forward})


def test_classes_of_one_name_are_told_apart(open_cache: Open) -> None:
    """Which a function made: the same ones on other layers are another model."""
    models = [tiny_model("LlamaConfig") for _ in range(2)]
    for model, scales in zip(models, ((1.0, 1.5), (1.5, 1.0)), strict=True):
        for layer, scale in zip(model.model.layers, scales, strict=False):
            layer.input_layernorm.__class__ = closed_over(type(layer.input_layernorm), scale)
    caches = [open_cache(model) for model in models]
    greedy(caches[0], IDS)
    assert [restored_blocks(cache) for cache in caches] == [BLOCKS, 0]


def test_a_replaced_function_of_pytorch_is_noticed(open_cache: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """As packages with faster attention do it."""
    real = torch.nn.functional.scaled_dot_product_attention
    model = tiny_model("LlamaConfig")
    cache = open_cache(model)
    greedy(cache, IDS)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *its, **by: real(*its, **by) * 1.5)
    assert restored_blocks(cache) == 0
    assert restored_blocks(open_cache(model)) == 0


def test_a_replaced_call_of_a_layer_is_noticed(open_cache: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("LlamaConfig")
    cache = open_cache(model)
    greedy(cache, IDS)
    real = torch.nn.Module.__call__
    norm = type(model.model.norm)
    monkeypatch.setattr(norm, "__call__", lambda self, x: real(self, x) * 1.5)
    assert restored_blocks(cache) == 0
    assert restored_blocks(open_cache(model)) == 0


def test_a_function_whose_code_is_exchanged_is_noticed(open_cache: Open) -> None:
    """As when a notebook reloads a module."""
    model = tiny_model("LlamaConfig")
    kind = type("Scaled", (type(model.model.norm),), {"forward": lambda self, x: x * 1.5})
    model.model.norm.__class__ = kind
    cache = open_cache(model)
    greedy(cache, IDS)
    assert restored_blocks(cache) == BLOCKS
    kind.forward.__code__ = (lambda self, x: x * 2.5).__code__
    assert restored_blocks(cache) == 0


def test_a_default_of_a_keyword_is_part_of_the_name(open_cache: Open) -> None:
    models = [tiny_model("LlamaConfig") for _ in range(2)]
    for model, scale in zip(models, (1.0, 1.5), strict=True):
        model.model.norm.__class__ = scaled(type(model.model.norm), scale)
    caches = [open_cache(model) for model in models]
    greedy(caches[0], IDS)
    assert [restored_blocks(cache) for cache in caches] == [BLOCKS, 0]


def test_attributes_in_a_namespace_are_part_of_the_name(open_cache: Open) -> None:
    model = tiny_model("LlamaConfig")
    model.model.layers[0].mlp.options = SimpleNamespace(scale=1.0)
    cache = open_cache(model)
    greedy(cache, IDS)
    assert restored_blocks(cache) == BLOCKS
    model.model.layers[0].mlp.options.scale = 2.0
    assert restored_blocks(cache) == 0


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


@contextmanager
def function_of_module(model: Any) -> Iterator[None]:
    """What the methods of its classes call, replaced where they find it."""
    home = sys.modules[type(model.model.layers[0]).__module__]
    rotated = home.apply_rotary_pos_emb

    def otherwise(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return rotated(query, key, cos, sin * 0.5)

    with attribute(home, "apply_rotary_pos_emb", otherwise):
        yield


class Scale(Enum):
    ONE = 1.0
    TWO = 2.0


class Scaling:
    """What somebody may keep in a module."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


def scaled_by(factor: float) -> Callable[[], float]:
    return lambda: factor


@pytest.mark.parametrize(
    "switch",
    [
        forward_of_class,
        function_of_module,
        lambda model: attribute(type(model.model.layers[0].mlp), "later", 1),
        lambda model: attribute(model.model.layers[1].mlp, "kind", Scale.TWO),
        lambda model: attribute(model.model.layers[1].mlp, "ordered", OrderedDict(a=2)),
        lambda model: attribute(model.model.layers[1].mlp, "scaled", Scaling(2.0)),
        lambda model: attribute(model.model.layers[1].mlp, "by", scaled_by(2.0)),
        lambda model: attribute(model.model.layers[1].mlp, "beside", [torch.nn.Linear(4, 4)]),
        lambda model: attribute(model.model.layers[1].self_attn, "config", copy.copy(model.config)),
        lambda model: attribute(model.model.layers[1].self_attn, "scaling", 0.5),
        lambda model: attribute(model.model.layers[1].mlp, "scaling", {"default": 2.0}),
        lambda model: attribute(model.config, "_attn_implementation", "eager"),
        lambda model: attribute(model.config, "rope_parameters", {"rope_type": "linear", "factor": 2.0}),
        lambda model: hook(model.model.layers[0].mlp),
        lambda model: other_forward(model.model.layers[0].mlp),
    ],
    ids=[
        "class",
        "function of a module",
        "attribute of a class",
        "enum",
        "ordered",
        "object",
        "closure",
        "module in a list",
        "config of a module",
        "attribute",
        "scale of an adapter",
        "attention",
        "RoPE",
        "hook",
        "forward",
    ],
)
def test_what_else_decides_the_result_is_part_of_the_name(
    open_cache: Open, monkeypatch: pytest.MonkeyPatch, switch: Callable[[Any], Any]
) -> None:
    model = tiny_model("LlamaConfig")
    mlp = model.model.layers[1].mlp
    mlp.scaling = {"default": 1.0}  # what PEFT puts into its layers
    mlp.kind, mlp.ordered, mlp.scaled = Scale.ONE, OrderedDict(a=1), Scaling(1.0)
    mlp.by, mlp.beside = scaled_by(1.0), [torch.nn.Linear(4, 4)]
    monkeypatch.setattr(type(mlp), "later", 0, raising=False)
    cache = open_cache(model)
    before = greedy(cache, IDS)
    with switch(model):
        assert restored_blocks(cache) == 0
        assert greedy(cache, IDS) == greedy(model, IDS)
        assert restored_blocks(cache) == BLOCKS
    assert restored_blocks(cache) == BLOCKS
    assert greedy(cache, IDS) == greedy(model, IDS) == before


def share(model: Any, first: int) -> None:
    model.model.layers[2].mlp = model.model.layers[first].mlp


def tie(model: Any, first: int) -> None:
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[first].mlp.up_proj.weight


@pytest.mark.parametrize("join", [share, tie])
def test_what_shares_which_weights_is_part_of_the_name(open_cache: Open, join: Callable[[Any, int], None]) -> None:
    """PyTorch lists each of them once, wherever it is."""
    models = [tiny_model("LlamaConfig"), tiny_model("LlamaConfig")]
    for first, model in enumerate(models):
        join(model, first)
    assert len({open_cache(model).watch.root() for model in models}) == 2


@pytest.mark.parametrize("switch", [forward_of_class, function_of_module])
def test_a_model_of_other_code_has_another_name(open_cache: Open, switch: Callable[[Any], Any]) -> None:
    """Also in another process, where nothing shows what was there before."""
    model = tiny_model("LlamaConfig")
    roots = [open_cache(model).watch.root()]
    with switch(model):
        roots += [open_cache(model).watch.root() for _ in range(2)]
    roots.append(open_cache(model).watch.root())
    assert roots[0] == roots[3] != roots[1] == roots[2]


def test_weights_that_were_changed_and_changed_back_during_a_call_store_nothing(open_cache: Open) -> None:
    """As where another thread swaps an average in and out: PyTorch counts these writes."""
    model = tiny_model("LlamaConfig")
    cache, weight = open_cache(model), model.model.layers[0].mlp.up_proj.weight

    def swap(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight.mul_(2.0)
            weight.div_(2.0)
        return scores

    greedy(cache, IDS, logits_processor=[swap])
    assert cache.connector.counters["stored_blocks"] == 0
    greedy(cache, IDS)
    assert restored_blocks(cache) == BLOCKS
