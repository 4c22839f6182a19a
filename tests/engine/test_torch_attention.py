"""Attention over the pool against the plain twin of the kernels, in every format and kind of pass."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from memory_cache import MemoryCache
from plain_model import greedy
from real_models import SaveModel, generated, prompt_of
from transformers import AutoModelForCausalLM

from tiercache.engine import Engine, EngineSettings, RequestOutput
from tiercache.engine.kv_pool import RAW, BatchSegment, KVLayout, KVPool
from tiercache.engine.torch_attention import TorchPass
from tiercache.errors import ConfigError
from tiercache.kernels.kv_formats import FORMATS
from tiercache.kernels.paged_attention import paged_attention_reference

pytestmark = pytest.mark.engine
LAYERS, SIZE, KV_HEADS, HEADS, HEAD_DIM = 3, 4, 2, 6, 16
LAYER = 1
CPU = torch.device("cpu")


class Options(NamedTuple):
    window: int = 0
    softcap: float | None = None
    sinks: bool = False

    def of_attention(self) -> dict[str, Any]:
        sinks = torch.linspace(-1, 1, HEADS) if self.sinks else None
        return {"window": self.window, "softcap": self.softcap, "sinks": sinks}


class Conversation:
    """A sequence with K and V of its own, and the blocks that it has in the pool."""

    def __init__(self, seed: int, length: int, table: list[int]) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.key = torch.randn(KV_HEADS, length, HEAD_DIM, generator=generator)
        self.key[:, :, 3] += 7.0
        self.value = torch.randn(KV_HEADS, length, HEAD_DIM, generator=generator)
        self.query = torch.randn(HEADS, length, HEAD_DIM, generator=generator)
        self.table = table
        self.done = 0


def new_pool(name: str, *, blocks: int = 60, tails: int = 4) -> KVPool:
    pool = KVPool(KVLayout(LAYERS, SIZE, KV_HEADS, HEAD_DIM, torch.float32, name), blocks, tails, CPU)
    # What is in memory before anything is written must not matter.
    if name == RAW:
        pool.blocks.fill_(math.nan)
    else:
        pool.blocks.fill_(0xFF)
    return pool


def run_pass(pool: KVPool, steps: list[tuple[Conversation, int]], options: Options) -> list[torch.Tensor]:
    """The pass that brings each conversation up to a length; its rows of the output, `[token, head, head_dim]`."""
    segments, row = [], 0
    for one, end in steps:
        segments.append(BatchSegment(row, one.done, end, one.table))
        row += end - one.done
    parts = [
        torch.cat([getattr(one, name)[:, one.done : end] for one, end in steps], dim=1)
        for name in ("query", "key", "value")
    ]
    work = TorchPass(pool, segments)
    out = work.attend(LAYER, *parts, scale=0.3, **options.of_attention())
    assert work.positions.tolist() == [token for one, end in steps for token in range(one.done, end)]
    results = [out[segment.row : segment.row + segment.end - segment.start] for segment in segments]
    for one, end in steps:
        one.done = end
    return results


def expected(pool: KVPool, one: Conversation, start: int, end: int, options: Options) -> torch.Tensor:
    """What queries `[start, end)` should get, from K and V as the pool is to keep them at that time."""
    key, value = (part.transpose(0, 1) for part in _kept(pool, one, end))
    return paged_attention_reference(
        one.query[:, start:end], [key], [value], [start], scale=0.3, **options.of_attention()
    )


def _kept(pool: KVPool, one: Conversation, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Full blocks through the format and back, the tokens behind them as they are."""
    block_format = pool.layout.block_format
    full = end // SIZE * SIZE
    key, value = one.key[:, :end].clone(), one.value[:, :end].clone()
    if full and block_format is not None:
        blocks = [part[:, :full].reshape(KV_HEADS, -1, SIZE, HEAD_DIM).permute(1, 2, 0, 3) for part in (key, value)]
        decoded = block_format.decode(block_format.encode(*blocks), torch.float32)
        key[:, :full], value[:, :full] = (part.transpose(0, 1).flatten(1, 2) for part in decoded)
    return key, value


def check(pool: KVPool, steps: list[tuple[Conversation, int]], options: Options = Options()) -> None:  # noqa: B008
    starts = [one.done for one, _ in steps]
    results = run_pass(pool, steps, options)
    for (one, end), start, result in zip(steps, starts, results, strict=True):
        torch.testing.assert_close(result, expected(pool, one, start, end, options), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [Options(), Options(window=6), Options(softcap=2.0, sinks=True)], ids=str)
@pytest.mark.parametrize("name", [RAW, *FORMATS])
def test_every_kind_of_pass_attends_to_the_right_tokens(name: str, options: Options) -> None:
    pool = new_pool(name)
    long = Conversation(1, 90, [30, 2, 31, 3, 32, 4, *range(5, 22)])
    short = Conversation(2, 24, [22, 24, 23, 26, 25, 27])
    tiny = Conversation(3, 9, [28, 29, 33])
    check(pool, [(Conversation(4, 68, list(range(40, 57))), 68)], options)  # whole blocks from the first token on
    check(pool, [(long, 70)], options)  # a chunk too long for the heads to become rows, ending within a block
    check(pool, [(short, 3), (long, 71), (tiny, 1)], options)  # a block begun, one going on, one decoded token
    check(pool, [(short, 4), (long, 72), (tiny, 2)], options)  # three single tokens; two fill their blocks
    check(pool, [(short, 17), (long, 73), (tiny, 3)], options)  # from within one block, through two, into a fourth
    check(pool, [(tiny, 4), (short, 18), (long, 80)], options)
    check(pool, [(tiny, 5), (short, 19), (long, 81)], options)
    check(pool, [(tiny, 6), (long, 82), (short, 20)], options)


def test_a_tail_goes_with_its_block() -> None:
    pool = new_pool("int8", tails=2)
    talk = Conversation(1, 20, [0, 1, 2, 3, 4])
    check(pool, [(talk, 6)])
    fork = Conversation(1, 20, [0, 7, 8, 9, 10])
    fork.done = 6
    pool.copy(1, 7)
    check(pool, [(talk, 7), (fork, 7)])
    assert pool.tails_of([]) == []
    with pytest.raises(AssertionError, match="block 1 has a tail and no owner"):
        pool.check_integrity({7})
    pool.retire(1)
    pool.retire(7)
    pool.check_integrity(set())
    third = Conversation(2, 20, [1, 2, 3])
    fourth = Conversation(3, 20, [7, 8, 9])
    check(pool, [(third, 3), (fourth, 2)])  # both tails were free again
    pool.check_integrity({1, 7})


def test_a_block_that_is_given_on_and_copied_into_has_the_tail_of_the_copy() -> None:
    pool = new_pool("int8", tails=2)
    first, second = Conversation(1, 20, [0, 1]), Conversation(2, 20, [2, 3])
    check(pool, [(first, 2), (second, 3)])
    pool.retire(0)  # and given to a fork of the second before another pass
    fork = Conversation(2, 20, [0, 5])
    fork.done = 3
    pool.copy(2, 0)
    check(pool, [(second, 4), (fork, 4)])
    check(pool, [(second, 5), (fork, 6)])
    pool.check_integrity({3, 5})


WINDOW, SINKS = 20, 8
SMALL: dict[str, Any] = {"block_size": 8, "chunk_size": 32, "pool_blocks": 24, "max_num_seqs": 4, "always_load": True}
STREAMING: dict[str, Any] = {**SMALL, "attention_window": WINDOW, "attention_sinks": SINKS}


class PaperLlama:
    """A Llama that keeps keys as they were before they were turned, and turns them by their places in the cache."""

    def __init__(self, folder: Path, window: int, sinks: int) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.window, self.sinks = window, sinks

    def turned(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """`x` `[..., head_dim]` at `places`, which lack the last dimension."""
        half = x.shape[-1] // 2
        theta = self.model.config.rope_parameters["rope_theta"]
        angles = places[..., None] * theta ** (-torch.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
        )

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """`[token, vocabulary]`."""
        x = self.model.model.embed_tokens(torch.tensor(tokens))
        for layer in self.model.model.layers:
            x = x + self.attend(layer.input_layernorm(x), layer.self_attn)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.lm_head(self.model.model.norm(x))

    def attend(self, x: torch.Tensor, layer: Any) -> torch.Tensor:
        count, head_dim = len(x), self.model.config.head_dim
        query, key, value = (
            project(x).view(count, -1, head_dim).transpose(0, 1)
            for project in (layer.q_proj, layer.k_proj, layer.v_proj)
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
        return layer.o_proj(out.reshape(len(query), count, head_dim).transpose(0, 1).reshape(count, -1))


def check_streaming(paper: PaperLlama, prompt: list[int], output: RequestOutput) -> None:
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
        check_streaming(paper, prompt, output)
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
    check_streaming(PaperLlama(folder, WINDOW, SINKS), prompt, output)
    limited = EngineSettings(**{**STREAMING, "max_model_len": 200})
    with Engine(folder, limited) as engine, pytest.raises(ConfigError, match="exceed the 200 tokens"):
        engine.generate([prompt], greedy(51))


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
