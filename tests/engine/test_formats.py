"""KV formats: their bytes, what they lose, and an engine that keeps its KV in them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_cache import MemoryCache
from random_models import SaveModel, prompt_of
from torch.overrides import TorchFunctionMode

import tiercache
from tiercache.engine import Engine, EngineSettings, SamplingParams, connect_to, describe_model
from tiercache.engine.tier_format import StagedCache
from tiercache.errors import ConfigError, DaemonUnavailable
from tiercache.kernels.kv_formats import FORMATS, BlockFormat

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("all_hits_are_loaded")]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
NATIVE_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def engine_of(model_dir: Path, connect: Any = None, **settings: Any) -> Engine:
    small = {"block_size": 8, "chunk_size": 32, "pool_blocks": 64, "max_num_seqs": 8}
    return Engine(model_dir, EngineSettings(**{**small, **settings}), connect)


# --- bytes


def test_the_bytes_of_an_int8_record() -> None:
    key = torch.tensor([[1.0, -254.0], [127.0, 0.0]]).view(2, 1, 2)  # two slots, one head, two channels
    value = torch.tensor([[127.0, 63.0], [0.0, 0.0]]).view(2, 1, 2)
    record = BlockFormat("int8", 2, 1, 2).encode(key, value)
    one, two, least = [0x80, 0x3F], [0x00, 0x40], [0x80, 0x00]  # bf16 1, 2, and 2^-126 for zeros
    assert record.tolist() == [1, 129, 127, 0, 127, 63, 0, 0, *one, *two, *one, *least]


def test_the_bytes_of_an_int4_record() -> None:
    key = torch.tensor([[-3.0, 100.0], [12.0, 107.5]]).view(2, 1, 2)
    value = torch.tensor([[0.0, 30.0], [0.0, 0.0]]).view(2, 1, 2)
    form = BlockFormat("int4", 2, 1, 2)
    record = form.encode(key, value)
    # Channel 0 of K: a step of 1, from -3 on. Channel 1: 107.5 / 127, which becomes 0.875, from 114 steps on.
    key_parts = [0x00, 0x9F], [255, 255 - 4], [256 - 3, 114], [2032 % 256, 2032 // 256]
    # Token 0 of V: a step of 2. Token 1 is zero, and its step 2^-16 of that, the least there is.
    value_parts = [0xF0, 0x00], [255, 0], [0, 0], [2048 % 256, 2048 // 256]
    (codes, *key_rest, key_base), (value_codes, *value_rest, value_base) = key_parts, value_parts
    expected = [codes, value_codes, *key_rest, *value_rest, key_base, value_base]
    assert record.tolist() == [byte for part in expected for byte in part]
    key_back, value_back = form.decode(record, torch.float32)
    assert key_back.tolist() == [[[-3.0, 114 * 0.875], [12.0, 123 * 0.875]]]
    assert value_back.tolist() == [[[0.0, 30.0], [0.0, 0.0]]]


class Divisors(TorchFunctionMode):
    """Collects what is divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.div, torch.Tensor.div, torch.Tensor.__truediv__):
            self.seen.append(args[1])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FORMATS)
def test_quotients_are_rounded_correctly_on_a_gpu_too(name: str) -> None:
    """There torch divides by a plain number by multiplying with its reciprocal, and the last bit differs."""
    with Divisors() as divisors:
        BlockFormat(name, 8, 2, 16).encode(*torch.randn(2, 8, 2, 16))
    assert divisors.seen
    assert all(isinstance(divisor, torch.Tensor) for divisor in divisors.seen)


@pytest.mark.parametrize("name", NATIVE_FP8)
def test_every_fp8_code_is_read_as_torch_reads_it(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    native = codes.view(NATIVE_FP8[name]).float()
    record = torch.zeros(BlockFormat(name, 256, 1, 1).record_bytes, dtype=torch.uint8)
    form = BlockFormat(name, 256, 1, 1)
    form.view(record, "key").copy_(codes.view(1, 256, 1))
    form.view(record, "key_scale").fill_(0.25)
    finite = native.isfinite()
    assert torch.equal(form.decode(record, torch.float32)[0].view(-1)[finite], native[finite] * 0.25)


@pytest.mark.parametrize(
    ("name", "size", "head_dim", "most"),
    [
        ("fp8_e4m3", 16, 64, 8.04),
        ("fp8_e5m2", 16, 64, 8.04),
        ("int8", 16, 64, 8.63),
        ("int4", 16, 64, 4.79),
        ("int4", 32, 128, 4.51),
    ],
)
def test_bits_for_each_number(name: str, size: int, head_dim: int, most: float) -> None:
    assert 8 * BlockFormat(name, size, 8, head_dim).record_bytes / (2 * size * 8 * head_dim) <= most


def test_a_format_that_does_not_fit_says_so() -> None:
    with pytest.raises(ValueError, match="int4 needs an even head_dim, not 5"):
        BlockFormat("int4", 16, 2, 5)
    with pytest.raises(ValueError, match="'int3' is no KV format: take one of fp8_e4m3"):
        BlockFormat("int3", 16, 2, 4)


# --- what is lost


def allowed_error(name: str, part: str, x: torch.Tensor, size: int, head_dim: int) -> torch.Tensor:
    """The largest error of each number that the format's description allows; x is `[n, slot, head, channel]`."""
    if name in NATIVE_FP8:
        mantissa, least = (3, 2.0**-9) if name == "fp8_e4m3" else (2, 2.0**-16)
        largest = x.abs().amax(dim=(1, 3), keepdim=True) / (448 if name == "fp8_e4m3" else 57344)
        return torch.maximum(x.abs() * 2.0 ** -(mantissa + 1), 2 * largest * least / 2)
    if name == "int8":
        return x.abs().amax(dim=1 if part == "key" else 3, keepdim=True) / 127 * (1 + 2**-7) / 2
    axis, group = (1, math.gcd(32, size)) if part == "key" else (3, math.gcd(32, head_dim))
    grouped = x.unflatten(axis, (-1, group))
    low, high = grouped.amin(dim=axis + 1, keepdim=True), grouped.amax(dim=axis + 1, keepdim=True)
    step = torch.maximum((high - low) / 15, torch.maximum(low.abs(), high.abs()) / 127) * (1 + 2**-4)
    return (step / 2).expand(grouped.shape).flatten(axis, axis + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("size", "head_dim"), [(16, 64), (8, 80), (48, 20)])
@pytest.mark.parametrize("name", FORMATS)
def test_no_number_is_further_off_than_allowed(name: str, size: int, head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    form = BlockFormat(name, size, 3, head_dim)
    key, value = torch.randn(2, 5, size, 3, head_dim, generator=generator)
    key[..., 3] += 20.0
    key[..., 7] *= 30.0
    value[1] = 0.0
    key[2, :, 1] = 0.0
    if dtype is torch.float32:
        key[3], value[3], key[4], value[4] = key[3] * 1e30, value[3] * 1e30, key[4] * 1e-30, value[4] * 1e-30
    key, value = key.to(dtype), value.to(dtype)
    records = form.encode(key, value)
    assert records.shape == (5, form.record_bytes)
    for part, given, back in zip(("key", "value"), (key, value), form.decode(records, torch.float32), strict=True):
        error = (back.transpose(1, 2) - given.float()).abs()
        assert (error <= allowed_error(name, part, given.float(), size, head_dim) * 1.0001).all(), part
        assert torch.equal(back.transpose(1, 2)[given == 0], torch.zeros(int((given == 0).sum())))
    assert torch.equal(form.encode(key, value), records)  # the same bytes for the same numbers, always


# --- the engine's pool


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "int8", "int4"])
def test_a_served_prompt_is_the_same_whole_chunked_alone_and_beside_others(name: str, exact: bool, llama: Path) -> None:
    prompts = [prompt_of(75, seed=1), prompt_of(31, seed=2), prompt_of(75, seed=1)[:50], prompt_of(5, seed=4)]
    with engine_of(llama, kv_cache_dtype=name, exact=exact) as engine:
        alone = [engine.generate([prompt], GREEDY)[0].tokens for prompt in prompts]
        engine.reset_pool()
        together = [output.tokens for output in engine.generate(prompts, GREEDY)]
        warm = [output.tokens for output in engine.generate(prompts, GREEDY)]
    assert together == alone
    assert warm == alone


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "int8", "int4"])
def test_warm_is_cold_bit_for_bit(name: str, dtype: str, llama: Path) -> None:
    with engine_of(llama, kv_cache_dtype=name, dtype=dtype) as engine:
        seen: list[torch.Tensor] = []
        forward = engine._model.forward
        engine._model.forward = lambda *args: seen.append(forward(*args)) or seen[-1]  # type: ignore[func-returns-value]
        [cold] = engine.generate([prompt_of(120)], GREEDY)
        passes = len(seen)
        [warm] = engine.generate([prompt_of(120)], GREEDY)
    assert (cold.pool_hit_tokens, warm.pool_hit_tokens) == (0, 112)
    for ours, theirs in zip(seen[passes:], seen[passes - 12 : passes], strict=True):
        assert torch.equal(ours, theirs)


def test_forks_and_a_tight_pool_lose_no_tail(llama: Path) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, n=3)
    prompts = [prompt_of(21 + 6 * number, seed=number) for number in range(3)]
    with engine_of(llama, kv_cache_dtype="int8") as engine:
        expected = [engine.generate([prompt], params) for prompt in prompts]
        tokens = [[fork.tokens for fork in forks] for forks in expected]
        assert all(forks == [forks[0]] * 3 for forks in tokens)  # greedy: each fork says the same
    with engine_of(llama, kv_cache_dtype="int8", pool_blocks=16, max_num_seqs=6) as tight:
        for prompt in prompts:
            tight.add_request(prompt, params)
        finished = 0
        for _ in range(2000):
            finished += sum(one.output is not None for one in tight.step())
            tight.check_integrity()
            if finished == 9:
                break
        assert finished == 9
        assert tight.stats()["preemptions"] > 0


def test_an_aborted_request_gives_its_tail_back(llama: Path) -> None:
    with engine_of(llama, kv_cache_dtype="int4", max_num_seqs=2) as engine:
        for seed in range(6):
            request = engine.add_request(prompt_of(11, seed), GREEDY)
            while not engine._sequences[request][0].output:
                engine.step()
            engine.abort(request)
            engine.check_integrity()


@pytest.mark.parametrize(("name", "least"), [("fp8", 1.98), ("int8", 1.84), ("int4", 3.3)])
def test_the_same_memory_holds_more_tokens(name: str, least: float, save_model: SaveModel) -> None:
    folder = save_model("LlamaConfig", head_dim=64)
    settings = {"pool_blocks": 0, "kv_cache_memory": "64MiB", "block_size": 16, "dtype": "bfloat16", "max_num_seqs": 4}
    with engine_of(folder, **settings) as raw, engine_of(folder, **settings, kv_cache_dtype=name) as small:
        assert small.stats()["pool_blocks"] / raw.stats()["pool_blocks"] > least


def test_each_format_is_a_namespace_of_its_own(llama: Path) -> None:
    names = ["auto", "fp8", "fp8_e5m2", "int8", "int4"]
    spaces = [describe_model(llama, EngineSettings(kv_cache_dtype=name))[0][0] for name in names]
    assert len({space.fingerprint() for space in spaces}) == 5
    assert [space.quantization for space in spaces] == ["none", "fp8_e4m3", "fp8_e5m2", "int8", "int4"]
    assert describe_model(llama, EngineSettings(tier_dtype="int8"))[0] == [spaces[3]]  # the same bytes, too


def test_a_model_that_a_format_cannot_keep_is_refused_with_a_remedy(save_model: SaveModel) -> None:
    # Heads of one channel do not exist; of an odd number they do not run, so the layout alone is asked.
    from tiercache.engine.model import read_shape

    shape = read_shape(save_model("GPT2Config", n_inner=96, num_key_value_heads=4), EngineSettings())
    with pytest.raises(ConfigError, match="cannot be kept as int4: int4 needs an even head_dim"):
        type(shape)(1, 1, 5, shape.dtype, 10, 10, (0,), frozenset()).kv_layout(16, "int4")


# --- the tiers


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("stage_blocks", [16, 5])
def test_a_raw_pool_stores_small_blocks_and_loads_them(
    name: str, stage_blocks: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiercache.engine.tier_format._STAGE_BYTES", 0)
    monkeypatch.setattr("tiercache.engine.tier_format._LEAST_STAGE_BLOCKS", stage_blocks)
    cache, prompt = MemoryCache(), prompt_of(150)
    with engine_of(llama, cache.connect, tier_dtype=name, load_timeout_s=30.0) as engine:
        [cold] = engine.generate([prompt], GREEDY)
        engine.drain()
        key_blocks = {key: engine.pool.blocks[block].clone() for key, block in engine._blocks._cached[0].items()}
        sizes = {block.numel() * block.itemsize for block in cache.blocks.values()}
        assert sizes == {engine.namespaces[0].block_bytes}
        assert engine.namespaces[0].block_bytes < engine.pool.layout.block_bytes / 2
        engine.reset_pool()
        [warm] = engine.generate([prompt], GREEDY)
        assert (cold.external_hit_tokens, warm.external_hit_tokens) == (0, 144)
        bound = {"fp8": 0.04, "int8": 0.01, "int4": 0.12}[name]
        for key in key_blocks.keys() & engine._blocks._cached[0].keys():
            loaded, computed = engine.pool.blocks[engine._blocks._cached[0][key]], key_blocks[key]
            assert not torch.equal(loaded, computed)
            assert (loaded - computed).norm() < bound * computed.norm()
        engine.drain()
        check_stage(engine)
        assert engine.stats()["loaded"] == 18
        assert cache.leases == set()


def check_stage(engine: Engine) -> None:
    assert engine._cache is not None
    [staged] = engine._cache._caches
    assert isinstance(staged, StagedCache)
    staged.check_integrity()


def test_a_load_that_comes_short_is_computed(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercache.engine.tier_format._STAGE_BYTES", 0)
    monkeypatch.setattr("tiercache.engine.tier_format._LEAST_STAGE_BLOCKS", 8)
    cache, prompt = MemoryCache(), prompt_of(150)
    with engine_of(llama, cache.connect, tier_dtype="int8", load_timeout_s=30.0) as engine:
        [cold] = engine.generate([prompt], GREEDY)
        engine.reset_pool()
        cache.good_blocks = 5  # of each piece; the others are spoilt
        [short] = engine.generate([prompt], GREEDY)
        assert short.external_hit_tokens == 32
        cache.refuse = True
        engine.reset_pool()
        [without] = engine.generate([prompt], GREEDY)
        cache.refuse = False
        assert without.external_hit_tokens == 0
        assert without.tokens == cold.tokens
        engine.drain()
        check_stage(engine)
        assert cache.leases == set()


@pytest.mark.parametrize("refused", ["load_async", "match"])
def test_a_cache_that_fails_between_two_pieces_costs_the_rest(
    llama: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    monkeypatch.setattr("tiercache.engine.tier_format._STAGE_BYTES", 0)
    monkeypatch.setattr("tiercache.engine.tier_format._LEAST_STAGE_BLOCKS", 8)
    cache, prompt = MemoryCache(), prompt_of(150)
    with engine_of(llama, cache.connect, tier_dtype="int8", load_timeout_s=30.0) as engine:
        [cold] = engine.generate([prompt], GREEDY)
        engine.reset_pool()
        cache.hold_transfers = True
        engine.add_request(prompt, GREEDY)
        engine.step()
        assert engine.stats()["loading"] == 1
        cache.hold_transfers = False

        def refuse(*_: object, **__: object) -> None:
            raise DaemonUnavailable("it has gone")

        with monkeypatch.context() as patch:
            patch.setattr(cache, refused, refuse)
            cache.finish_all()
            outputs = [output for _ in range(60) for output in engine.step()]
        results = [output.output for output in outputs if output.output is not None]
        assert [result.prompt_tokens for result in results] == [150]
        assert 0 < results[0].external_hit_tokens < cold.prompt_tokens - 8
        engine.drain()
        engine.check_integrity()
        check_stage(engine)
        assert cache.leases == set()


def test_an_aborted_load_ends_and_frees_its_stage(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercache.engine.tier_format._STAGE_BYTES", 0)
    monkeypatch.setattr("tiercache.engine.tier_format._LEAST_STAGE_BLOCKS", 8)
    cache, prompt = MemoryCache(), prompt_of(150)
    with engine_of(llama, cache.connect, tier_dtype="int8", load_timeout_s=30.0) as engine:
        engine.generate([prompt], GREEDY)
        engine.reset_pool()
        cache.hold_transfers = True
        request = engine.add_request(prompt, GREEDY)
        engine.step()
        assert engine.stats()["loading"] == 1
        engine.abort(request)
        cache.finish_all()
        cache.hold_transfers = False
        engine.drain()
        engine.check_integrity()
        check_stage(engine)
        assert cache.leases == set()


@pytest.mark.parametrize(
    "forms", [{"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "int4"}, {"tier_dtype": "int8"}], ids=str
)
def test_small_blocks_survive_their_engine_in_a_real_daemon(forms: dict[str, str], llama: Path) -> None:
    prompt = prompt_of(120)
    with tiercache.launch(arena="64MiB") as daemon:
        connect = connect_to(daemon.address, required=True)
        settings = {"load_timeout_s": 30.0, **forms}
        with engine_of(llama, connect, **settings) as engine:
            [cold] = engine.generate([prompt], GREEDY)
            assert engine.drain()
            blocks = {key: engine.pool.blocks[block].clone() for key, block in engine._blocks._cached[0].items()}
        with engine_of(llama, connect, **settings) as engine:
            [warm] = engine.generate([prompt], GREEDY)
            loaded = {key: engine.pool.blocks[block].clone() for key, block in engine._blocks._cached[0].items()}
    assert (cold.external_hit_tokens, warm.external_hit_tokens) == (0, 112)
    assert loaded.keys() == blocks.keys()
    if "kv_cache_dtype" in forms:
        assert warm.tokens == cold.tokens
        assert all(torch.equal(loaded[key], blocks[key]) for key in blocks)
    else:
        assert all((loaded[key] - blocks[key]).norm() < 0.01 * blocks[key].norm() for key in blocks)


def test_two_forms_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="set one of the two to 'auto'"):
        EngineSettings(kv_cache_dtype="fp8", tier_dtype="int8")
