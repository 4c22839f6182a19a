"""From logits to the next token, per request."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from tiercache.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. Raises ConfigError when a value is wrong.

    Attributes:
        max_tokens: tokens to generate at most.
        temperature: 0 is greedy.
        top_p: sample from the smallest set of tokens with at least this probability.
        top_k: sample from this many most probable tokens; 0 is all.
        seed: makes the choice repeatable; None draws one.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
        stop_token_ids: further tokens to stop at. The token stopped at is part of the output.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}: must be at least 1")
        if not self.temperature >= 0:
            raise ConfigError(f"temperature is {self.temperature}: must be 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}: must be above 0 and at most 1")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}: must be 0 (all) or more")


class Sampler:
    """The random state of one request; greedy requests have none."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._generator: torch.Generator | None = None
        if params.temperature > 0:
            self._generator = torch.Generator()
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(params.seed)

    @property
    def greedy(self) -> bool:
        return self._generator is None

    def draw(self, logits: torch.Tensor) -> int:
        """One token from `logits`, `[vocabulary]` of float32 on the CPU."""
        params = self.params
        values, tokens = torch.sort(logits / params.temperature, descending=True, stable=True)
        if params.top_k:
            values, tokens = values[: params.top_k], tokens[: params.top_k]
        probabilities = torch.softmax(values, dim=-1)
        if params.top_p < 1:
            # A token stays while the tokens before it have not yet reached top_p.
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities[before < params.top_p]
        choice = torch.multinomial(probabilities, 1, generator=self._generator)
        return int(tokens[int(choice)])


def choose_tokens(logits: torch.Tensor, samplers: SequenceOf[Sampler]) -> list[int]:
    """The next token of each row of `logits` `[rows, vocabulary]`. Waits for the device."""
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    drawn = [row for row, sampler in enumerate(samplers) if not sampler.greedy]
    if drawn:
        rows = logits[drawn].float().cpu()
        for values, row in zip(rows, drawn, strict=True):
            chosen[row] = samplers[row].draw(values)
    return chosen
