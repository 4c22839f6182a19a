"""Sinks and a window against the attention that the paper describes, spelled out with every key turned anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from memory_cache import MemoryCache
from plain_model import greedy
from real_models import SaveModel, generated, prompt_of
from transformers import AutoModelForCausalLM

from tiercache.engine import Engine, EngineSettings, RequestOutput, describe_model
from tiercache.errors import ConfigError

pytestmark = pytest.mark.engine
WINDOW, SINKS = 20, 8
SMALL: dict[str, Any] = {"block_size": 8, "chunk_size": 32, "pool_blocks": 24, "max_num_seqs": 4, "always_load": True}
STREAMING: dict[str, Any] = {**SMALL, "attention_window": WINDOW, "attention_sinks": SINKS}


class PaperLlama:
    """A Llama that keeps keys as they were before they were turned, and turns them by their places in the cache."""

    def __init__(self, folder: Path, window: int, sinks: int) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.config, self.weights = model.config, model.state_dict()
        self.window, self.sinks = window, sinks

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scaled = x * (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return scaled * self.weights[f"{name}.weight"]

    def turned(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """`x` `[..., head_dim]` at `places`, which lack the last dimension."""
        half = x.shape[-1] // 2
        theta = self.config.rope_parameters["rope_theta"]
        angles = places[..., None] * theta ** (-torch.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
        )

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """`[token, vocabulary]`."""
        x = self.weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        for layer in range(self.config.num_hidden_layers):
            name = f"model.layers.{layer}"
            x = x + self.linear(self.attend(self.norm(x, f"{name}.input_layernorm"), name), f"{name}.self_attn.o_proj")
            y = self.norm(x, f"{name}.post_attention_layernorm")
            gate = torch.nn.functional.silu(self.linear(y, f"{name}.mlp.gate_proj"))
            x = x + self.linear(gate * self.linear(y, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
        return self.linear(self.norm(x, "model.norm"), "lm_head")

    def attend(self, x: torch.Tensor, name: str) -> torch.Tensor:
        count, head_dim = len(x), self.config.head_dim
        query, key, value = (
            self.linear(x, f"{name}.self_attn.{part}_proj").view(count, -1, head_dim).transpose(0, 1) for part in "qkv"
        )
        group = len(query) // len(key)
        p, t = torch.arange(count)[:, None], torch.arange(count)[None]
        sink = t < self.sinks
        seen = (t <= p) & (sink | (t > p - self.window))
        moved = (p - (self.sinks + self.window - 1)).clamp(min=0)  # how many tokens have left the cache
        places = torch.where(sink, t.expand(count, count), t - moved)
        keys = self.turned(key[:, None].expand(-1, count, -1, -1), places)  # [kv_head, query, key, head_dim]
        queries = self.turned(query, (p - moved)[:, 0]).view(len(key), group, count, 1, head_dim)
        scores = (queries * keys[:, None]).sum(-1) * head_dim**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out = weights @ value[:, None]
        return out.reshape(len(query), count, head_dim).transpose(0, 1).reshape(count, -1)


def check(paper: PaperLlama, prompt: list[int], output: RequestOutput) -> None:
    """Each token is the likeliest after those before it."""
    logits = paper.logits(prompt + output.tokens)[len(prompt) - 1 : -1]
    assert output.tokens == logits.argmax(-1).tolist()


def test_tokens_are_those_of_the_paper_however_they_are_computed(llama: Path) -> None:
    paper = PaperLlama(llama, WINDOW, SINKS)
    prompts = [prompt_of(120, seed=1), prompt_of(9, seed=2), prompt_of(40, seed=3)]
    cache = MemoryCache()
    with Engine(llama, EngineSettings(**STREAMING), connect=cache.connect) as engine:
        together = engine.generate(prompts, greedy(60))
        engine.check_integrity()
        engine.reset_pool()
        [loaded] = engine.generate(prompts[:1], greedy(60))
        [warm] = engine.generate(prompts[:1], greedy(60))
        engine.check_integrity()
    with Engine(llama, EngineSettings(**STREAMING, enable_chunked_prefill=False, exact=False)) as engine:
        [whole] = engine.generate(prompts[:1], greedy(60))
    for prompt, output in zip(prompts, together, strict=True):
        check(paper, prompt, output)
    assert loaded.tokens == warm.tokens == whole.tokens == together[0].tokens
    assert (loaded.external_hit_tokens, warm.pool_hit_tokens) == (112, 112)
    # It matters that the keys are turned, and that the sinks are there.
    assert paper.logits(prompts[0])[-1].argmax() == together[0].tokens[0]
    full = generated(llama, prompts[0], 60)
    assert full != together[0].tokens


def test_a_chat_outlives_the_model_and_the_pool(save_model: SaveModel) -> None:
    folder = save_model("LlamaConfig", max_position_embeddings=64)
    prompt = prompt_of(150, seed=4)
    with Engine(folder, EngineSettings(**{**STREAMING, "pool_blocks": 12})) as engine:
        assert engine.max_model_len == 1 << 18
        [output] = engine.generate([prompt], greedy(150))
        engine.check_integrity()
    check(PaperLlama(folder, WINDOW, SINKS), prompt, output)
    limited = EngineSettings(**{**STREAMING, "max_model_len": 200})
    with Engine(folder, limited) as engine, pytest.raises(ConfigError, match="exceed the 200 tokens"):
        engine.generate([prompt], greedy(51))


def test_blocks_have_names_of_their_own(llama: Path) -> None:
    options = ({}, {"attention_window": 20}, {"attention_window": 28}, {"attention_window": 20, "attention_sinks": 9})
    described = {describe_model(llama, EngineSettings(**SMALL, **changes))[1] for changes in options}
    assert len(described) == 4
    [namespace], root = describe_model(llama, EngineSettings(**SMALL, attention_window=20, attention_sinks=5))
    assert ([namespace], root) == describe_model(llama, EngineSettings(**SMALL, attention_window=20, attention_sinks=8))
    assert (namespace.group, namespace.window_blocks) == ("window", 1 + 3)


@pytest.mark.parametrize(
    ("config_class", "options", "text"),
    [
        ("MistralConfig", {"sliding_window": 24}, r"every layer of this model has a sliding window of its own \(24\)"),
        ("GPT2Config", {"n_inner": 96, "num_key_value_heads": 4}, "GPT2LMHeadModel does not turn its queries"),
        ("CohereConfig", {}, "CohereForCausalLM does not turn its queries"),
        ("LlamaConfig", {"max_position_embeddings": 24}, "beside 8 tokens of sinks it can be 16"),
    ],
)
def test_models_for_which_it_makes_no_sense_are_refused(
    config_class: str, options: dict[str, Any], text: str, save_model: SaveModel
) -> None:
    with pytest.raises(ConfigError, match=text) as refusal:
        Engine(save_model(config_class, **options), EngineSettings(**STREAMING))
    assert "\n" not in str(refusal.value)
