"""The engine without a cache: scheduling, prefix reuse in the pool, limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_watch import record_logits, run_checked
from random_models import SaveModel, prompt_of

from tiercache.engine import Engine, EngineSettings, RequestOutput, SamplingParams
from tiercache.errors import ConfigError

pytestmark = pytest.mark.engine
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def engine_of(model_dir: Path, **settings: Any) -> Engine:
    small = {"block_size": 8, "chunk_size": 32, "pool_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 72}
    return Engine(model_dir, EngineSettings(**{**small, **settings}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_warm_is_cold_bit_for_bit(dtype: str, llama: Path) -> None:
    prompt = prompt_of(120)
    with engine_of(llama, dtype=dtype) as engine:
        cold_logits = record_logits(engine)
        [cold] = engine.generate([prompt], GREEDY)
        passes = len(cold_logits)
        [warm] = engine.generate([prompt], GREEDY)
        warm_logits = cold_logits[passes:]
    assert (cold.pool_hit_tokens, warm.pool_hit_tokens) == (0, 112)
    assert passes == 5 - 1 + 12  # chunks end at 32, 64, 96, 112 and 120; the last gives the first token
    assert len(warm_logits) == 12
    for ours, theirs in zip(warm_logits, cold_logits[-12:], strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_in_the_pool_does_not_depend_on_what_else_runs(llama: Path) -> None:
    prompts = [prompt_of(100), prompt_of(100)[:77] + prompt_of(9, seed=5), prompt_of(41, seed=6), prompt_of(100)[:50]]

    def blocks_by_key(engine: Engine) -> dict[bytes, torch.Tensor]:
        return {key: engine.pool.blocks[block_id].clone() for key, block_id in engine._blocks._cached[0].items()}

    alone: dict[bytes, torch.Tensor] = {}
    for prompt in prompts:
        with engine_of(llama) as engine:
            engine.generate([prompt], GREEDY)
            for key, block in blocks_by_key(engine).items():
                assert torch.equal(alone.setdefault(key, block), block)
    with engine_of(llama) as engine:
        engine.generate(prompts, GREEDY)
        engine.generate(prompts[::-1], GREEDY)
        together = blocks_by_key(engine)
    assert together.keys() == alone.keys()
    for key, block in together.items():
        assert torch.equal(block, alone[key])


def test_loose_reuse_takes_generated_blocks_too(llama: Path) -> None:
    prompt = prompt_of(30)
    with engine_of(llama, exact=False) as engine:
        [first] = engine.generate([prompt], GREEDY)
        follow_up = prompt + first.tokens + prompt_of(10, seed=3)
        [second] = engine.generate([follow_up], GREEDY)
        assert second.pool_hit_tokens == 40  # 30 + 12 tokens, of which the last was never computed
    with engine_of(llama, exact=False) as engine:
        [cold] = engine.generate([follow_up], GREEDY)
    assert cold.pool_hit_tokens == 0
    assert cold.tokens == second.tokens


def test_shared_prefixes_share_blocks(llama: Path) -> None:
    with engine_of(llama) as engine:
        first = engine.add_request(prompt_of(70), GREEDY)
        while engine._sequences[first][0].prefilling:
            engine.step()
        second = engine.add_request(prompt_of(64) + prompt_of(6, seed=9), GREEDY)
        engine.step()
        tables = [engine._sequences[one][0].tables[0].ids for one in (first, second)]
        assert tables[0][:8] == tables[1][:8]
        assert set(tables[0][8:]).isdisjoint(tables[1][8:])
        outputs = run_checked(engine)
        assert outputs[second].pool_hit_tokens == 64


@pytest.mark.parametrize("exact", [True, False])
def test_a_pool_too_small_for_all_preempts_and_loses_nothing(exact: bool, llama: Path) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [prompt_of(30 + 7 * number, seed=number) for number in range(4)]
    with engine_of(llama, exact=exact) as roomy:
        expected = [roomy.generate([prompt], params)[0].tokens for prompt in prompts]
    with engine_of(llama, exact=exact, pool_blocks=24) as tight:
        ids = [tight.add_request(prompt, params) for prompt in prompts]
        outputs = run_checked(tight)
        assert tight.stats()["preemptions"] > 0
        assert [outputs[request_id].tokens for request_id in ids] == expected


def test_evicted_blocks_are_computed_again(llama: Path) -> None:
    with engine_of(llama, pool_blocks=16) as engine:
        [before] = engine.generate([prompt_of(100)], GREEDY)
        engine.generate([prompt_of(100, seed=1)], GREEDY)
        [after] = engine.generate([prompt_of(100)], GREEDY)
        assert engine.stats()["evictions"] > 0
    assert after.pool_hit_tokens < 96
    assert after.tokens == before.tokens


def test_scattered_blocks_are_read_in_their_order(llama: Path) -> None:
    with engine_of(llama) as engine:
        [expected] = engine.generate([prompt_of(60)], GREEDY)
    with engine_of(llama, pool_blocks=17) as engine:
        ids = [engine.add_request(prompt_of(20, seed=seed), GREEDY) for seed in (1, 2, 3)]
        engine.step()
        engine.abort(ids[1])
        request_id = engine.add_request(prompt_of(60), GREEDY)
        scattered = False
        outputs: dict[int, RequestOutput] = {}
        while engine.unfinished:
            outputs |= {one.request_id: one.output for one in engine.step() if one.output is not None}
            if request_id in engine._sequences:
                table = engine._sequences[request_id][0].tables[0].ids
                scattered |= table != list(range(table[0], table[0] + len(table))) if table else False
        assert scattered
        assert outputs[request_id].tokens == expected.tokens


def test_decodes_and_prompts_share_a_pass_when_reuse_is_loose(llama: Path) -> None:
    with engine_of(llama, exact=False, max_num_batched_tokens=40) as engine:
        engine.add_request(prompt_of(5), SamplingParams(max_tokens=30, ignore_eos=True))
        engine.step()
        engine.add_request(prompt_of(40, seed=1), GREEDY)
        sizes: list[int] = []
        forward = engine._model.forward

        def counting(batch: Any, tokens: list[int], rows: list[int]) -> torch.Tensor:
            sizes.append(len(tokens))
            return forward(batch, tokens, rows)

        engine._model.forward = counting  # type: ignore[method-assign]
        engine.step()
        engine.step()
        assert sizes == [1 + 32, 1 + 8]


def test_a_step_computes_no_more_prompt_than_its_budget(llama: Path) -> None:
    with engine_of(llama, max_num_batched_tokens=40) as engine:
        for seed in range(3):
            engine.add_request(prompt_of(32, seed=seed), GREEDY)
        engine.step()
        computed = sorted(one.computed for [one] in engine._sequences.values())
        assert computed == [0, 0, 32]  # in chunks of 24 and 8; another 24 would be too many
        run_checked(engine)


def test_stops_at_end_tokens_unless_told_otherwise(llama: Path) -> None:
    prompt = prompt_of(20)
    with engine_of(llama) as engine:
        [free] = engine.generate([prompt], SamplingParams(max_tokens=30, ignore_eos=True))
        stop = free.tokens[5]
        at = free.tokens.index(stop)
        [stopped] = engine.generate([prompt], SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(stop,)))
        assert (stopped.tokens, stopped.finish_reason) == (free.tokens[: at + 1], "stop")
        assert free.finish_reason == "length"
        object.__setattr__(engine.shape, "eos_token_ids", frozenset([stop]))
        [ended] = engine.generate([prompt], SamplingParams(max_tokens=30))
        assert (ended.tokens, ended.finish_reason) == (free.tokens[: at + 1], "stop")


def test_seeds_repeat_whatever_runs_beside(llama: Path) -> None:
    params = SamplingParams(max_tokens=10, temperature=0.8, top_p=0.9, top_k=20, seed=3, ignore_eos=True)
    with engine_of(llama) as engine:
        [alone] = engine.generate([prompt_of(20)], params)
        crowd = engine.generate([prompt_of(20), prompt_of(33, seed=1)], [params, GREEDY])
        [other] = engine.generate([prompt_of(20)], SamplingParams(max_tokens=10, temperature=0.8, seed=4))
    assert crowd[0].tokens == alone.tokens
    assert other.tokens != alone.tokens


def test_aborted_requests_give_everything_back(llama: Path) -> None:
    with engine_of(llama, max_num_seqs=1) as engine:
        running = engine.add_request(prompt_of(50), GREEDY)
        waiting = engine.add_request(prompt_of(50, seed=1), GREEDY)
        engine.step()
        for request_id in (running, waiting):
            [output] = engine.abort(request_id)
            assert output.finish_reason == "abort"
            engine.check_integrity()
        assert engine.abort(running) == []
        assert not engine.unfinished
        assert engine.stats()["idle_blocks"] == 64


def test_reset_pool_forgets_all_and_waits_for_requests(llama: Path) -> None:
    with engine_of(llama) as engine:
        request_id = engine.add_request(prompt_of(50), GREEDY)
        engine.step()
        with pytest.raises(ConfigError, match="the pool is in use"):
            engine.reset_pool()
        engine.abort(request_id)
        engine.generate([prompt_of(50)], GREEDY)
        engine.reset_pool()
        engine.check_integrity()
        [output] = engine.generate([prompt_of(50)], GREEDY)
        assert output.pool_hit_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ([], SamplingParams(), "the prompt is empty"),
        ([5, 128], SamplingParams(), r"not in 0\.\.127"),
        ([-1], SamplingParams(), r"not in 0\.\.127"),
        ([5] * 500, SamplingParams(max_tokens=13), "exceed the 512 tokens .* lower max_tokens to 12, or raise pool_"),
        ([5] * 512, SamplingParams(max_tokens=1), "that a sequence may have: shorten the prompt, or raise pool_blocks"),
        ([5], SamplingParams(n=9), "n is 9: lower it to max_num_seqs 8"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    prompt: list[int], params: SamplingParams, text: str, llama: Path
) -> None:
    with engine_of(llama) as engine:
        with pytest.raises(ConfigError, match=text):
            engine.add_request(prompt, params)
        assert not engine.unfinished


def test_prompts_beside_one_that_cannot_be_served_do_not_stay(llama: Path) -> None:
    with engine_of(llama) as engine:
        with pytest.raises(ConfigError, match="the prompt is empty"):
            engine.generate([[5], [6], []], GREEDY)
        with pytest.raises(ValueError, match="zip"):
            engine.generate([[5], [6]], [GREEDY])
        assert not engine.unfinished
        engine.check_integrity()


def test_the_largest_request_fits(llama: Path) -> None:
    with engine_of(llama) as engine:
        [output] = engine.generate([prompt_of(500)], SamplingParams(max_tokens=12, ignore_eos=True))
        assert len(output.tokens) == 12


def test_pool_and_device_settings_that_cannot_be_met(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"one block takes 12.0 KiB: raise kv_cache_memory"):
        engine_of(llama, pool_blocks=0, kv_cache_memory=1000, dtype="float32", block_size=16)
    with pytest.raises(ConfigError, match=r"the KV pool takes 1024.0 TiB of memory .* lower kv_cache_memory"):
        engine_of(llama, pool_blocks=0, kv_cache_memory=1 << 50)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch finds no CUDA device"):
            engine_of(llama, device="cuda")


def test_a_context_longer_than_the_pool_is_refused_with_what_fits(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"the KV pool holds 512 .* max_model_len to 512 .* pool_blocks to 125"):
        engine_of(llama, max_model_len=1000)
    with pytest.raises(ConfigError, match=r"holds 680 tokens: .* or raise kv_cache_memory to 1MiB"):
        engine_of(llama, max_model_len=1000, pool_blocks=0, kv_cache_memory="0.5MiB")
    with engine_of(llama, max_model_len=100) as engine:
        assert engine.max_model_len == 100
        with pytest.raises(ConfigError, match=r"exceed the 100 tokens .* or raise max_model_len"):
            engine.add_request([5] * 90, SamplingParams(max_tokens=11))
    with engine_of(llama, pool_blocks=300) as engine:
        assert engine.max_model_len == 2048  # what the model was made for
        with pytest.raises(ConfigError, match=r"exceed the 2048 tokens that a sequence may have: shorten the prompt$"):
            engine.add_request([5] * 2048, SamplingParams(max_tokens=1))


def test_windows_hide_what_lies_before_them_across_blocks(save_model: SaveModel) -> None:
    folder = save_model("MistralConfig", sliding_window=24)
    prompt = prompt_of(90)
    changed = [*prompt_of(4, seed=8), *prompt[4:]]
    with engine_of(folder) as engine:
        both = engine.generate([prompt, changed], GREEDY)
    # Three layers of 24 reach 3 * 23 tokens back: tokens 0..3 cannot reach the last of 90.
    assert both[0].tokens == both[1].tokens
