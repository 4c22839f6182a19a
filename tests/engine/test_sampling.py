"""The choice of tokens."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tiercache.engine.sampling import Sampler, SamplingParams, choose_tokens
from tiercache.errors import ConfigError

pytestmark = pytest.mark.engine
PROBABILITIES = torch.tensor([0.05, 0.5, 0.15, 0.3])
LOGITS = PROBABILITIES.log()


def drawn(count: int = 400, **params: float | int) -> Counter[int]:
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, "seed": 1, **params}))
    return Counter(sampler.draw(LOGITS) for _ in range(count))


def test_greedy_and_sampled_rows_mix() -> None:
    logits = torch.stack([LOGITS, LOGITS, -LOGITS])
    samplers = [
        Sampler(SamplingParams()),
        Sampler(SamplingParams(temperature=1.0, top_k=1)),
        Sampler(SamplingParams()),
    ]
    assert choose_tokens(logits, samplers) == [1, 1, 0]


def test_draws_follow_the_probabilities() -> None:
    counts = drawn(4000)
    for token, probability in enumerate(PROBABILITIES.tolist()):
        assert counts[token] / 4000 == pytest.approx(probability, abs=0.03)


def test_top_k_and_top_p_cut_the_tail() -> None:
    assert set(drawn(top_k=2)) == {1, 3}
    assert set(drawn(top_p=0.5)) == {1}
    assert set(drawn(top_p=0.81)) == {1, 2, 3}
    assert set(drawn(temperature=0.01)) == {1}


def test_a_seed_makes_it_repeatable() -> None:
    def tokens(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed))
        return [sampler.draw(LOGITS) for _ in range(64)]

    assert tokens(7) == tokens(7)
    assert tokens(7) != tokens(8)
    assert tokens(None) != tokens(None)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -1}, "top_k is -1"),
    ],
)
def test_wrong_params_are_named(params: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        SamplingParams(**params)
