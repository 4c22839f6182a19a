"""Models that are written to, switched over and hooked into while a cache is in front of them."""

from __future__ import annotations

import copy
import functools
import logging
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar

import pytest
import torch
from huggingface_hub.utils import get_session
from tiny_models import Open, greedy, prompt, tiny_model
from torch.nn.functional import silu
from transformers import DynamicCache, GPT2LMHeadModel, LlamaConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from tiercache.connectors.transformers import watch as watching
from tiercache.connectors.transformers.watch import ModelWatch
from tiercache.connectors.transformers_cache import PrefixCache
from tiercache.errors import ModelRefused

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
from tiercache.connectors.transformers import watch as watching
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


def test_what_does_not_change_a_model_does_not_rename_it() -> None:
    def make() -> Any:
        model = tiny_model("LlamaConfig")
        for layer in model.model.layers:
            layer.parents = [model]  # the usual way not to register a module
        return model

    model = make()
    watch = ModelWatch(model, "", "")
    root = watch.root()
    get_session()  # which huggingface_hub keeps in a global, as any request to the Hub does
    make().set_attn_implementation("eager")
    model._previous_max_cache_length = 64  # as `generate` leaves it, with a static cache
    assert watch.root() == root == ModelWatch(make(), "", "").root()


def test_modules_that_are_shared_and_contain_each_other_are_listed_once() -> None:
    """Of 60 pairs in each other there are 2 ** 60 paths."""
    model, alone = tiny_model("LlamaConfig"), tiny_model("LlamaConfig")
    nested: torch.nn.Module = torch.nn.Linear(2, 2).eval()
    for _ in range(60):
        nested = torch.nn.Sequential(nested, nested).eval()
    model.nested = alone.nested = nested
    model.model.layers[0].parent = model
    assert ModelWatch(model, "", "").root() != ModelWatch(alone, "", "").root()


@pytest.mark.parametrize("model_id", ["", "named"])
@pytest.mark.parametrize("inside", [lambda steps: steps, lambda steps: [steps], lambda steps: {"a": (1, steps)}])
def test_a_write_to_one_element_of_a_tensor_that_is_an_attribute_is_noticed(
    model_id: str, inside: Callable[[torch.Tensor], Any]
) -> None:
    model, steps = tiny_model("LlamaConfig"), torch.zeros(5000)
    model.model.norm.steps = inside(steps)
    watch = ModelWatch(model, model_id, "")
    before = watch.root()
    steps[1234] = 1.0
    changed = watch.root()
    steps[1234] = 0.0
    assert before == watch.root() != changed


@pytest.mark.parametrize("model_id", ["", "named"])
@pytest.mark.parametrize("kind", [torch.nn.Parameter, torch.Tensor])
def test_another_tensor_is_noticed_at_the_same_address_too(model_id: str, kind: type[torch.Tensor]) -> None:
    """A large one is often put where the one before it was, and few of its rows may differ."""
    model, rows = tiny_model("LlamaConfig"), torch.zeros(5000, 2)
    model.model.norm.rows = kind(rows)
    watch = ModelWatch(model, model_id, "")
    before = watch.root()
    rows.data[1234] = 1.0  # as the bytes of the next one, which PyTorch does not count
    model.model.norm.rows = None
    model.model.norm.rows = kind(rows)
    assert watch.root() != before


class Factor:
    """What somebody may keep in a module."""

    def __init__(self, factor: float = 1.5) -> None:
        self.factor = factor

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return states * self.factor

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Unreadable(Mapping[str, int]):
    def __getitem__(self, key: str) -> int:
        raise RuntimeError(key)

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError

    def __len__(self) -> int:
        raise RuntimeError


class OwnNorm(modeling_llama.LlamaRMSNorm):  # type: ignore[misc]
    scales: ClassVar = [1.5]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * self.scales[0]


class Unchanged(modeling_llama.LlamaRMSNorm):  # type: ignore[misc]
    pass


@functools.wraps(silu)
def scaled_silu(states: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return silu(states) * 1.5


def nested_lists(depth: int) -> list[Any]:
    return [nested_lists(depth - 1)] if depth else []


def norm(model: Any) -> Any:
    return model.model.norm


def norm_class(model: Any) -> Any:
    return type(model.model.norm)


def mlp(model: Any) -> Any:
    return model.model.layers[1].mlp


Place = tuple[Callable[[Any], Any], Any]
"""Where something is put: an object and the name of an attribute, or a table and a key."""
FURTHER: Place = norm, "further"
ROTATE: Place = lambda model: modeling_llama, "rotate_half"


def put(model: Any, place: Place, value: Any, patch: pytest.MonkeyPatch) -> None:
    target, name = place[0](model), place[1]
    if isinstance(target, dict):
        patch.setitem(target, name, value)
    else:
        patch.setattr(target, name, value, raising=False)


FOREIGN: dict[str, tuple[Place, Callable[[Any], Any], str]] = {
    "user's class": ((norm, "__class__"), lambda model: OwnNorm, "class of model.norm"),
    "user's class without code": (
        (norm, "__class__"),
        lambda model: Unchanged,
        "class of model.norm is .*test_watch.Unchanged",
    ),
    "object": (FURTHER, lambda model: Factor(), "further of model.norm is an object of .*test_watch.Factor"),
    "object in a container": (FURTHER, lambda model: {"a": [Factor()]}, "an object of .*test_watch.Factor"),
    "function": (FURTHER, lambda model: scaled_silu, "further of model.norm is the function"),
    "class": (FURTHER, lambda model: Factor, "the class .*test_watch.Factor"),
    "partial": (FURTHER, lambda model: functools.partial(scaled_silu, inplace=False), "the function"),
    "partial of an object": (FURTHER, lambda model: functools.partial(silu, Factor()), ".*test_watch.Factor"),
    "method of an object": (FURTHER, lambda model: Factor().__call__, "the function"),
    "builtin method of an object": (FURTHER, lambda model: [1.5].__getitem__, "method-wrapper|__getitem__"),
    "jit": (FURTHER, lambda model: torch.jit.trace(lambda x: x * 2, torch.ones(1)), "torch.*ScriptFunction"),
    "compiled": (FURTHER, lambda model: torch.compile(scaled_silu), "further of model.norm is"),
    "decorated": (FURTHER, lambda model: torch.no_grad()(scaled_silu), "the function"),
    "mapping": (FURTHER, lambda model: Unreadable(), "an object of .*test_watch.Unreadable"),
    "large list": (FURTHER, lambda model: [0] * 128_000, "further of model.norm is too large"),
    "deep list": (FURTHER, lambda model: nested_lists(20), "levels deep"),
    "other module": (FURTHER, lambda model: [torch.nn.Linear(4, 4)], "a module that is not the model's"),
    "meta tensor": (FURTHER, lambda model: torch.ones(2, device="meta"), "a tensor without bytes"),
    "object in the config": ((lambda model: model.config, "further"), lambda model: Factor(), "Factor"),
    "user's config": (
        (lambda model: model.config, "__class__"),
        lambda model: type("Mine", (LlamaConfig,), {}),
        "Mine",
    ),
    "forward of a module": ((norm, "forward"), lambda model: scaled_silu, "forward of model.norm is the function"),
    "bound forward of a module": (
        (norm, "forward"),
        lambda model: MethodType(OwnNorm.forward, model.model.norm),
        "forward of model.norm is the function",
    ),
    "hook": (
        (lambda model: model.model.norm._forward_hooks, 1),
        lambda model: scaled_silu,
        "_forward_hooks of model.norm is the function",
    ),
    "hook of all modules": (
        (lambda model: torch.nn.modules.module._global_forward_hooks, 1),
        lambda model: scaled_silu,
        "the function",
    ),
    "method": ((norm_class, "forward"), lambda model: OwnNorm.forward, "LlamaRMSNorm.forward is the function"),
    "list in a class": (
        (norm_class, "further"),
        lambda model: [Factor()],
        "LlamaRMSNorm.further is an object of .*test_watch.Factor",
    ),
    "call of PyTorch's": (
        (lambda model: torch.nn.Module, "__call__"),
        lambda model: scaled_silu,
        "Module.__call__ is the function",
    ),
    "code in place": (
        (lambda model: modeling_llama.rotate_half, "__code__"),
        lambda model: (lambda x: x * 2.5).__code__,
        "rotate_half is the function",
    ),
    "function of transformers": (ROTATE, lambda model: scaled_silu, "modeling_llama.rotate_half is the function"),
    "object instead of a function": (
        ROTATE,
        lambda model: Factor(),
        "modeling_llama.rotate_half is an object of .*test_watch.Factor",
    ),
    "partial instead of a function": (
        ROTATE,
        lambda model: functools.partial(scaled_silu),
        "modeling_llama.rotate_half is the function",
    ),
    "partial with a tensor": (
        (norm_class, "further"),
        lambda model: functools.partial(silu, torch.ones(1)),
        "LlamaRMSNorm.further has a tensor",
    ),
    "wrapped function of PyTorch": (
        (lambda model: torch.nn.functional, "silu"),
        lambda model: scaled_silu,
        "torch.nn.functional.silu is the function",
    ),
    "attention of PyTorch": (
        (lambda model: torch.nn.functional, "scaled_dot_product_attention"),
        lambda model: scaled_silu,
        "scaled_dot_product_attention is the function",
    ),
    "function that PyTorch's modules call": (
        (lambda model: torch.nn.functional, "linear"),
        lambda model: scaled_silu,
        "torch.nn.functional.linear is the function",
    ),
    "experts of transformers": (
        (lambda model: ALL_EXPERTS_FUNCTIONS._global_mapping, "own"),
        lambda model: scaled_silu,
        "attention or experts is the function",
    ),
    "attention of transformers": (
        (lambda model: modeling_llama.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa"),
        lambda model: scaled_silu,
        "attention or experts is the function",
    ),
    "module instead of PyTorch's": (
        (lambda model: modeling_llama, "nn"),
        lambda model: type(torch)("torch.nn"),
        "modeling_llama.nn is the module",
    ),
    "method of the cache": (
        (lambda model: DynamicCache, "update"),
        lambda model: scaled_silu,
        "Cache.update is the function",
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(("place", "make", "words"), FOREIGN.values(), ids=list(FOREIGN))
def test_code_that_no_version_names_needs_a_model_id(place: Place, make: Callable[[Any], Any], words: str) -> None:
    model = tiny_model("LlamaConfig")
    model.config._experts_implementation = "own"
    plain, named = ModelWatch(model, "", ""), ModelWatch(model, "weights and code", "")
    roots, changes = (plain.root(), named.root()), plain.changes
    with pytest.MonkeyPatch.context() as patch:
        put(model, place, make(model), patch)
        with pytest.raises(ModelRefused, match=f"({words}).*: pass model_id="):
            plain.root()
        with pytest.raises(ModelRefused, match=f"({words}).*: pass model_id="):
            ModelWatch(model, "", "")
        assert named.root() != roots[1], "what comes after a model_id was given is not what it named"
        ModelWatch(model, "these weights and this code", "")
    assert (plain.root(), named.root()) == roots
    assert plain.changes > changes, "what was computed meanwhile is not stored"


def test_other_functions_of_the_same_packages_are_another_model() -> None:
    """Their places tell them apart, in all processes."""
    model = tiny_model("LlamaConfig")
    watch = ModelWatch(model, "", "")
    roots = [watch.root()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_llama, "rotate_half", torch.nn.functional.relu)
        roots += [watch.root(), ModelWatch(model, "", "").root()]
    roots.append(watch.root())
    model.model.norm.forward = MethodType(GPT2LMHeadModel.forward, model.model.norm)
    roots.append(watch.root())
    assert (roots[0], roots[1]) == (roots[3], roots[2])
    assert len(set(roots)) == 3


def test_a_model_with_code_of_somebody_is_served_under_a_model_id(open_cache: Open) -> None:
    model = tiny_model("LlamaConfig")
    cache = open_cache(model)
    greedy(cache, IDS)
    model.model.norm.__class__ = OwnNorm
    assert greedy(cache, IDS) == greedy(model, IDS)
    assert (cache.bypassed, restored_blocks(cache)) == (1, 0)
    cache.weights_changed("these weights, with OwnNorm")
    assert greedy(cache, IDS) == greedy(model, IDS)
    assert restored_blocks(cache) == BLOCKS


def swap(model: Any) -> None:
    """As where another thread swaps an average in and out: PyTorch counts these writes."""
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2.0).div_(2.0)


@pytest.mark.parametrize("update", [copy_data, swap])
def test_nothing_is_stored_of_a_call_during_which_weights_changed(
    open_cache: Open, update: Callable[[Any], None]
) -> None:
    """Under any name, and though they may be again what they were."""
    model = tiny_model("LlamaConfig")
    cache = open_cache(model)

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == IDS.shape[1] + 2:
            update(model)
        return scores

    greedy(cache, IDS, logits_processor=[process])
    assert cache.connector.counters["stored_blocks"] == restored_blocks(cache) == 0
    greedy(cache, IDS)
    assert restored_blocks(cache) == BLOCKS


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


def no_grads(model: Any) -> Any:
    return model.requires_grad_(False)


def bfloat16(model: Any) -> Any:
    return model.to(torch.bfloat16)


def autocast(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


def test_casts_that_autocast_keeps_are_not_served(open_cache: Open) -> None:
    """In one region PyTorch casts a float32 weight that requires grad only once, though it is updated meanwhile."""
    model = tiny_model("LlamaConfig")
    with autocast(cache_enabled=False):
        cache = open_cache(model)
    with autocast():
        with pytest.raises(ModelRefused, match=r"cache_enabled=False.*requires_grad_"):
            open_cache(model)
        assert greedy(cache, IDS) == greedy(model, IDS)
    assert (cache.bypassed, cache.connector.counters["stored_blocks"]) == (1, 0)


KEPT_NOT: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "casts off": (lambda model: model, lambda: autocast(cache_enabled=False)),
    "no gradients": (no_grads, nullcontext),
    "its own type": (bfloat16, nullcontext),
    "inference": (lambda model: model, torch.inference_mode),
}


@pytest.mark.parametrize(("prepare", "within"), KEPT_NOT.values(), ids=list(KEPT_NOT))
def test_an_update_under_autocast_is_noticed_where_it_keeps_no_casts(
    open_cache: Open, prepare: Callable[[Any], Any], within: Callable[[], Any]
) -> None:
    model = prepare(tiny_model("LlamaConfig"))
    with autocast(), within():
        cache = open_cache(model)
        greedy(cache, IDS)
        copy_data(model)
        assert restored_blocks(cache) == 0
        found = greedy(cache, IDS)
        assert restored_blocks(cache) == BLOCKS
    with autocast():
        assert found == greedy(model, IDS)


def test_the_default_dtype_is_part_of_the_name() -> None:
    """The `forward` of Ministral 3 makes the scales of its queries of it."""
    model = tiny_model("LlamaConfig")
    watch = ModelWatch(model, "named", "")
    before = watch.root()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert before != watch.root() == ModelWatch(model, "named", "").root()
    finally:
        torch.set_default_dtype(torch.float32)
    assert watch.root() == before


def test_another_autocast_than_at_the_start_goes_without_the_cache(open_cache: Open) -> None:
    model = no_grads(tiny_model("LlamaConfig"))
    cache = open_cache(model)
    greedy(cache, IDS)
    with autocast():
        assert greedy(cache, IDS) == greedy(model, IDS)
        under = open_cache(model)
        assert restored_blocks(under) == restored_blocks(cache) == 0
    assert (cache.bypassed, restored_blocks(cache)) == (2, BLOCKS)


EXCHANGED: dict[str, tuple[Place, Any]] = {
    "attribute of a class": ((lambda model: type(mlp(model)), "later"), 1),
    "object": ((mlp, "scaled"), Factor(2.0)),
    "closure": ((mlp, "by"), lambda: 2.0),
    "module in a list": ((mlp, "beside"), [torch.nn.Linear(4, 4)]),
    "scale of an adapter": ((mlp, "scaling"), {"default": 2.0}),
    "config of a module": ((lambda model: model.model.layers[1].self_attn, "config"), LlamaConfig()),
    "attention": ((lambda model: model.config, "_attn_implementation"), "eager"),
    "RoPE": ((lambda model: model.config, "rope_parameters"), {"rope_type": "linear", "factor": 2.0}),
}


@pytest.mark.parametrize(("place", "value"), EXCHANGED.values(), ids=list(EXCHANGED))
def test_what_is_exchanged_behind_a_model_id_is_noticed(
    monkeypatch: pytest.MonkeyPatch, place: Place, value: Any
) -> None:
    model = tiny_model("LlamaConfig")
    its = mlp(model)
    its.scaling = {"default": 1.0}  # what PEFT puts into its layers
    its.scaled, its.by, its.beside = Factor(1.0), lambda: 1.0, [torch.nn.Linear(4, 4)]
    monkeypatch.setattr(type(its), "later", 0, raising=False)
    watch = ModelWatch(model, "these weights and all this", "")
    before = watch.root()
    with pytest.MonkeyPatch.context() as patch:
        put(model, place, value, patch)
        assert len({before, watch.root(), ModelWatch(model, "others", "").root()}) == 3
    assert watch.root() == before


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


def set_config(**fields: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for name, value in fields.items():
            setattr(model.config, name, value)

    return change


def make_attention_look_ahead(model: Any) -> None:
    """As LLM2Vec does."""
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


def use_attention_without_mask(model: Any) -> None:
    """transformers gives a function none for which no function for masks is registered."""
    ALL_ATTENTION_FUNCTIONS.register("without_mask", sdpa_attention_forward)
    model.set_attn_implementation("without_mask")


FULL = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
LATER: dict[str, tuple[str, dict[str, Any], Callable[[Any], None]]] = {
    "not causal by its config": ("LlamaConfig", {}, set_config(is_causal=False)),
    "both ways by its config": (
        "Gemma3TextConfig",
        {"sliding_window": 512, **FULL},
        set_config(use_bidirectional_attention=True),
    ),
    "not causal by an attribute": ("LlamaConfig", {}, make_attention_look_ahead),
    "no decoder": ("BertConfig", {"is_decoder": True}, set_config(is_decoder=False)),
    "attention without a mask": ("LlamaConfig", {}, use_attention_without_mask),
}


@pytest.mark.parametrize("model_id", ["", "named"])
@pytest.mark.parametrize(("config_class", "options", "change"), LATER.values(), ids=list(LATER))
def test_a_model_whose_tokens_attend_to_later_ones_by_now_goes_without_the_cache(
    open_cache: Open, config_class: str, options: dict[str, Any], change: Callable[[Any], None], model_id: str
) -> None:
    """It is tried again: its name says only that it is another model."""
    model = tiny_model(config_class, **options)
    cache = open_cache(model, model_id=model_id)
    kept = cache.restore(IDS)
    greedy(cache, IDS)
    change(model)
    stored = cache.connector.counters["stored_blocks"]
    for _ in range(2):
        assert greedy(cache, IDS) == greedy(model, IDS)
    assert restored_blocks(cache) == cache.store(kept, IDS) == 0
    assert (cache.bypassed, cache.connector.counters["stored_blocks"]) == (3, stored)


def test_a_model_is_tried_once_in_each_form_that_it_is_switched_to(
    open_cache: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And served in each. Other weights need no trial."""
    model, trials = tiny_model("LlamaConfig"), list[str]()
    cache = open_cache(model)
    real = cache.watch.try_again
    monkeypatch.setattr(cache.watch, "try_again", lambda: trials.append(model.config._attn_implementation) or real())
    for number in range(2):
        for kind in ("sdpa", "eager"):
            model.set_attn_implementation(kind)
            assert restored_blocks(cache) == BLOCKS * number
            assert greedy(cache, IDS) == greedy(model, IDS)
            assert restored_blocks(cache) == BLOCKS
    copy_data(model)
    assert restored_blocks(cache) == 0
    assert greedy(cache, IDS) == greedy(model, IDS)
    assert restored_blocks(cache) == BLOCKS
    assert (trials, cache.bypassed) == (["eager"], 0)
    model.config.is_causal = False
    assert restored_blocks(cache) == 0
    del model.config.is_causal
    assert (restored_blocks(cache), cache.bypassed) == (BLOCKS, 1)


def test_a_model_that_counts_padding_by_now_is_served_without_padding(open_cache: Open) -> None:
    model = tiny_model("LlamaConfig")
    cache = open_cache(model, model_id="named")
    padded = torch.cat([torch.zeros(1, 24, dtype=torch.long), IDS], 1)
    mask = (padded != 0).long()
    greedy(cache, padded, attention_mask=mask)
    forward = model.model.forward
    model.model.forward = lambda position_ids=None, **inputs: forward(**inputs)
    assert greedy(cache, padded, attention_mask=mask) == greedy(model, padded, attention_mask=mask)
    assert (cache.bypassed, restored_blocks(cache)) == (1, 0)
    assert greedy(cache, IDS) == greedy(model, IDS)
    assert restored_blocks(cache) == BLOCKS


def test_a_model_with_k_of_another_shape_needs_another_cache(open_cache: Open) -> None:
    model = tiny_model("LlamaConfig")
    cache = open_cache(model)
    model.config.num_hidden_layers = 2
    assert greedy(cache, IDS) == greedy(model, IDS)
    assert cache.bypassed == 1


def test_a_declared_change_needs_a_trial() -> None:
    """The change may be inside of an object that is not looked at. There is no limit to such changes."""
    watch, trials = ModelWatch(tiny_model("LlamaConfig"), "named", ""), list[int]()
    watch.try_again = lambda: trials.append(1)
    for _ in range(watching.MAX_TRIALS + 2):
        watch.weights_changed()
        watch.root()
    assert len(trials) == watching.MAX_TRIALS + 2


def test_a_hook_that_asks_for_the_name_of_a_model_in_its_trial_gets_a_miss(open_cache: Open) -> None:
    model, found = tiny_model("LlamaConfig"), list[int]()
    cache = open_cache(model, model_id="with a hook")
    model.register_forward_hook(lambda *_: found.append(restored_blocks(cache)))
    cache.restore(IDS)
    assert found
    assert set(found) == {0}


def test_a_trial_that_could_not_be_made_is_made_again() -> None:
    """A model that cannot be served is refused without another one."""
    model, trials = tiny_model("LlamaConfig"), list[int]()
    watch = ModelWatch(model, "", "")

    def try_again() -> None:
        trials.append(1)
        raise ModelRefused("out of memory") from (MemoryError() if len(trials) < 2 else None)

    watch.try_again = try_again
    model.config.further = 1
    for expected in (1, 2, 2):
        with pytest.raises(ModelRefused, match="out of memory"):
            watch.root()
        assert len(trials) == expected


def test_a_model_that_changes_all_the_time_is_not_tried_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MAX_TRIALS", 3)
    model, trials = tiny_model("LlamaConfig"), list[int]()
    watch = ModelWatch(model, "", "")
    watch.try_again = lambda: trials.append(1)
    for model.config.further in range(3):
        watch.root()
    model.config.further = 3
    with pytest.raises(ModelRefused, match="make a new cache"):
        watch.root()
    assert len(trials) == 3


PLAIN: dict[str, tuple[Any, Any]] = {
    "number": (1.0, 2.0),
    "type of a number": (1, 1.0),
    "list": ([1, (2, {3})], [1, (2, {4})]),
    "order": ([1, 2], [2, 1]),
    "dict": ({"a": OrderedDict(b=1)}, {"a": OrderedDict(b=2)}),
    "dtype": (torch.float16, torch.float32),
    "function of PyTorch": (silu, torch.nn.functional.relu),
    "partial": (functools.partial(silu, inplace=True), functools.partial(silu, inplace=False)),
    "tensor": ([torch.ones(3)], [torch.zeros(3)]),
    "array": ({"a": torch.ones(3).numpy()}, {"a": torch.zeros(3).numpy()}),
    "config": (LlamaConfig(), LlamaConfig(rms_norm_eps=0.1)),
}


@pytest.mark.parametrize("change", ["dtype", "bytes"])
def test_the_frequencies_of_a_long_rope_are_part_of_the_name(change: str) -> None:
    """Those that it replaces as it goes are not; they are made of the others, whose type `model.to` changes."""
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 4.0}
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    one, other = (tiny_model("LlamaConfig", rope_parameters={**scaling, **factors}) for _ in range(2))
    watch = ModelWatch(one, "", "")
    assert watch.root() == ModelWatch(other, "", "").root()
    rope = one.model.rotary_emb
    if change == "bytes":
        rope.original_inv_freq.mul_(0.5)
        assert watch.root() != ModelWatch(other, "", "").root()
        return
    rope.original_inv_freq = rope.original_inv_freq.to(torch.bfloat16)
    with pytest.raises(ModelRefused, match="of another type"):
        watch.root()
    assert ModelWatch(one, "", "").root() != ModelWatch(other, "", "").root()


def test_the_frequencies_beside_those_of_a_long_rope_are_part_of_the_name() -> None:
    """Only one kind of its layers has a long RoPE."""
    long = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 4.0}
    long |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    ropes = {"full_attention": long, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    model = tiny_model("Gemma3TextConfig", num_hidden_layers=2, layer_types=[*ropes], rope_parameters=ropes)
    watch = ModelWatch(model, "", "")
    before = watch.root()
    model.model.rotary_emb.full_attention_inv_freq = torch.ones(8)  # as a long prompt leaves it
    assert watch.root() == before
    model.model.rotary_emb.sliding_attention_inv_freq.mul_(0.1)
    assert watch.root() != before


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor|.*torch.ao")
def test_quantised_tensors_of_pytorch_are_refused_and_not_read() -> None:
    """To read one as another type ends the process."""
    model = tiny_model("LlamaConfig")
    model.model.norm.further = torch.quantize_per_tensor(torch.ones(300), 0.1, 0, torch.qint8)
    with pytest.raises(ModelRefused, match=r"the bytes of .* cannot be read"):
        ModelWatch(model, "", "")


@pytest.mark.parametrize(("one", "other"), PLAIN.values(), ids=list(PLAIN))
def test_plain_attributes_are_part_of_the_name(one: Any, other: Any) -> None:
    model = tiny_model("LlamaConfig")
    model.model.norm.further = one
    watch = ModelWatch(model, "", "")
    roots = [watch.root(), ModelWatch(model, "", "").root()]
    for value in (other, copy.deepcopy(one)):
        model.model.norm.further = value
        roots.append(watch.root())
    assert roots[0] == roots[1] == roots[3] != roots[2]
