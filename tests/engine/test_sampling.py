"""The choice of tokens."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.engine import sampling
from tiercache.engine.sampling import Sampler, SamplingParams, choose
from tiercache.errors import ConfigError

pytestmark = pytest.mark.engine
PROBABILITIES = torch.tensor([0.05, 0.5, 0.15, 0.3])
LOGITS = PROBABILITIES.log()
END = 1


def drawn(count: int = 400, **params: Any) -> Counter[int]:
    """What `count` independent sequences choose, all in one batch."""
    samplers = [Sampler(SamplingParams(**{"temperature": 1.0, "seed": seed, **params})) for seed in range(count)]
    return Counter(choice.token for choice in choose(LOGITS.expand(count, -1), samplers))


def sequence(logits: torch.Tensor, count: int, prompt: tuple[int, ...] = (), **params: Any) -> list[int]:
    """What one sequence chooses step by step."""
    sampler = Sampler(SamplingParams(max_tokens=1000, **params), prompt)
    return [choose(logits[None], [sampler], end_tokens=[END])[0].token for _ in range(count)]


def test_draws_follow_the_probabilities() -> None:
    counts = drawn(4000)
    for token, probability in enumerate(PROBABILITIES.tolist()):
        assert counts[token] / 4000 == pytest.approx(probability, abs=0.03)


def test_a_seed_makes_it_repeatable_in_any_company() -> None:
    def tokens(seed: int | None, company: int = 0) -> list[int]:
        params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=64)]
        params += [SamplingParams(temperature=2.0, top_p=0.9)] * company
        samplers = [Sampler(one) for one in params]
        batch = LOGITS.expand(len(samplers), -1)
        return [choose(batch, samplers)[0].token for _ in range(64)]

    assert tokens(7) == tokens(7) == tokens(7, company=3)
    assert tokens(7) != tokens(8)
    assert tokens(None) != tokens(None)


def test_broken_logits_still_give_a_token() -> None:
    logits = torch.full((2, 4), math.nan)
    samplers = [Sampler(SamplingParams()), Sampler(SamplingParams(temperature=1.0, top_p=0.5, top_k=2, min_p=0.1))]
    assert all(0 <= choice.token < 4 for choice in choose(logits, samplers))


def test_cuts_leave_the_most_probable_tokens() -> None:
    assert set(drawn(top_k=2)) == {1, 3}
    assert set(drawn(top_p=0.5)) == {1}
    assert set(drawn(top_p=0.81)) == {1, 2, 3}
    assert set(drawn(temperature=0.01)) == {1}
    assert set(drawn(min_p=0.31)) == {1, 3}
    assert set(drawn(min_p=0.29)) == {1, 2, 3}
    # 0.5 of the 0.8 that top_k leaves are 0.625.
    assert set(drawn(top_k=2, top_p=0.62)) == {1}
    assert set(drawn(top_k=2, top_p=0.63)) == {1, 3}


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 1000),
    top_k=st.sampled_from([0, 1, 3, 40]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.2]),
    flat=st.booleans(),
    candidates=st.sampled_from([1, 4, 1024]),
)
def test_cuts_are_those_of_a_plain_sort(
    seed: int, top_k: int, top_p: float, min_p: float, flat: bool, candidates: int
) -> None:
    """Against one row at a time with everything sorted; also where the candidates do not suffice."""
    logits = torch.randn(3, 32, generator=torch.Generator().manual_seed(seed)) * (0.1 if flat else 3)
    limits = sampling.Limits([1.0] * 3, [min_p] * 3, [top_k] * 3, [top_p] * 3)
    steps = torch.linspace(0, 1, 201)[:-1].tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_CANDIDATES", candidates)
        found = [sampling.draw(logits, limits, [step] * 3).tolist() for step in steps]
    for row in range(3):
        values, order = torch.softmax(logits[row], -1).sort(descending=True)
        kept = values >= min_p * values[0]
        if top_k:
            kept[top_k:] = False
        values = torch.where(kept, values, 0.0)
        before = (values.cumsum(-1) - values) / values.sum()
        allowed = set(order[kept & (before < top_p + 1e-6)].tolist())
        surely = set(order[kept & (before < top_p - 1e-6) & (values > 0.01 * values.sum())].tolist())
        seen = {tokens[row] for tokens in found}
        assert surely <= seen <= allowed


def test_penalties_are_those_of_their_definitions() -> None:
    logits = torch.tensor([2.0, 1.5, -1.0, 0.0])
    # 2.0, then 2.0 - 0.6 = 1.4 < 1.5, then 0.9 < 1.4, ...
    assert sequence(logits, 4, presence_penalty=0.6) == [0, 1, 0, 0]
    assert sequence(logits, 4, frequency_penalty=0.3) == [0, 0, 1, 0]
    # The prompt counts for the repetition penalty, and a negative logit is made smaller too.
    assert sequence(logits, 2, prompt=(0, 3), repetition_penalty=2.0) == [1, 0]
    assert sequence(torch.tensor([-1.0, -1.5]), 2, prompt=(0, 0), repetition_penalty=2.0) == [1, 0]


def test_no_end_before_min_tokens() -> None:
    assert sequence(LOGITS, 3, min_tokens=2) == [3, 3, END]
    assert sequence(LOGITS, 3, min_tokens=2, stop_token_ids=(3,)) == [2, 2, END]
    assert sequence(LOGITS, 3, min_tokens=2, ignore_eos=True, stop_token_ids=(3,)) == [END, END, END]
    assert END not in sequence(LOGITS, 50, min_tokens=50, temperature=3.0, seed=1)


def test_logprobs_are_those_of_the_model_itself() -> None:
    params = [
        SamplingParams(logprobs=2),
        SamplingParams(),
        SamplingParams(logprobs=0, logit_bias={0: 50.0}),
        SamplingParams(logprobs=20, temperature=0.5, presence_penalty=1.0, top_k=1),
    ]
    first, nothing, biased, all_four = choose((LOGITS + 3).expand(4, -1), [Sampler(one) for one in params])
    assert nothing.logprobs is None
    assert first.logprobs is not None
    assert first.logprobs.logprob == pytest.approx(math.log(0.5))
    assert [token for token, _ in first.logprobs.top] == [1, 3]
    assert [math.exp(value) for _, value in first.logprobs.top] == pytest.approx([0.5, 0.3])
    assert biased.token == 0
    assert biased.logprobs is not None
    assert (math.exp(biased.logprobs.logprob), biased.logprobs.top) == (pytest.approx(0.05), [])
    assert all_four.logprobs is not None
    assert [token for token, _ in all_four.logprobs.top] == [1, 3, 2, 0]


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"n": 0}, "n is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"min_tokens": 17}, "min_tokens is 17"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"presence_penalty": 3.0}, "presence_penalty is 3.0"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"logit_bias": {5: 101.0}}, "logit_bias is {5: 101.0}"),
        ({"stop": ("a", "")}, "none empty"),
        ({"stop": ("a",) * 17}, "at most 16"),
        ({"stop_token_ids": (5,) * 1025}, r"stop_token_ids is \(5, 5, .*\.\.\.: must be at most 1024 tokens"),
        ({"logprobs": 21}, "logprobs is 21: must be 0 to 20"),
    ],
)
def test_wrong_params_are_named(params: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        SamplingParams(**params)


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 10**30},
        {"top_k": 10**30, "top_p": 0.5, "min_p": 1.0},
        {"temperature": 1e308},
        {"temperature": 1.1e-5},
        {"repetition_penalty": 1e-320},
        {"repetition_penalty": 1e308, "logit_bias": {0: 100.0, 1: -100.0}},
        {"min_tokens": 5, "stop_token_ids": (0, 1, 2, 3)},
        {"seed": 10**40},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_whatever_a_client_sends_gives_a_token(params: dict[str, Any], dtype: torch.dtype) -> None:
    for temperature in (0.0, 1.0):
        sampler = Sampler(SamplingParams(**{"temperature": temperature, "logprobs": 2, **params}), [0, 3])
        for _ in range(4):
            [chosen] = choose(LOGITS[None].to(dtype), [sampler], end_tokens=[END])
            assert 0 <= chosen.token < 4
