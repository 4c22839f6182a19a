"""Arithmetic on logits: biases and penalties, truncation of a distribution, sampling, log-probabilities.

All of it works on whole batches `[rows, vocabulary]` of float32, on any device.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

# Sorting a whole vocabulary takes longer than a small model's step. This many of the most probable tokens
# nearly always reach `top_p`; if they do not, all are sorted.
_CANDIDATES = 1024


@dataclass(slots=True)
class Changes:
    """Single logits to change: `values[i]` for token `tokens[i]` of row `rows[i]`."""

    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def extend(self, row: int, tokens: Iterable[int], values: list[float]) -> None:
        self.rows += [row] * len(values)
        self.tokens += tokens
        self.values += values


class Limits(NamedTuple):
    """How each row is truncated, in the order of the fields; see `SamplingParams`."""

    temperature: list[float]
    min_p: list[float]
    top_k: list[int]
    top_p: list[float]


def change(logits: torch.Tensor, scale: Changes, add: Changes) -> None:
    """Penalise logits by the factors of `scale` (no logit twice), then add the values of `add`. In place."""
    if scale.rows:
        places = torch.tensor([scale.rows, scale.tokens], device=logits.device).unbind()
        factors = torch.tensor(scale.values, device=logits.device)
        old = logits[places]
        logits[places] = torch.where(old > 0, old / factors, old * factors)
    if add.rows:
        places = torch.tensor([add.rows, add.tokens], device=logits.device).unbind()
        logits.index_put_(places, torch.tensor(add.values, device=logits.device), accumulate=True)


def draw(logits: torch.Tensor, limits: Limits, uniforms: list[float]) -> torch.Tensor:
    """One token per row, `[rows]` of int64: where the distribution's running sum reaches the row's `uniforms`."""
    device = logits.device
    probabilities = torch.softmax(logits / torch.tensor(limits.temperature, device=device)[:, None], dim=-1)
    if any(limits.min_p):
        shares = torch.tensor(limits.min_p, device=device)[:, None]
        _drop_below(probabilities, probabilities.amax(dim=-1, keepdim=True) * shares)
    cut = [row for row, (k, p) in enumerate(zip(limits.top_k, limits.top_p, strict=True)) if k or p < 1]
    if cut:
        some = probabilities[cut]
        top_k = torch.tensor([limits.top_k[row] for row in cut], device=device)
        top_p = torch.tensor([limits.top_p[row] for row in cut], device=device)
        _drop_below(some, _least_kept(some, top_k, top_p))
        probabilities[cut] = some
    sums = probabilities.cumsum(dim=-1, dtype=torch.float64)
    goals = torch.tensor(uniforms, dtype=torch.float64, device=device)[:, None] * sums[:, -1:]
    # The first token whose sum exceeds the goal: never a token of probability 0.
    found = torch.searchsorted(sums, goals, right=True)[:, 0]
    return found.clamp_(max=logits.shape[1] - 1)


def _drop_below(probabilities: torch.Tensor, least: torch.Tensor) -> None:
    probabilities.masked_fill_(probabilities < least, 0)


def _least_kept(probabilities: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The probability of the last token that `top_k`, then `top_p`, leave: `[rows, 1]`.

    A limit by value and not by rank, so that the order of equal values in the sort does not matter.
    """
    vocabulary = probabilities.shape[1]
    ranks = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)[:, None]
    asked = int(top_k.max())
    for width in (min(vocabulary, max(asked, _CANDIDATES)), vocabulary):
        best = probabilities.topk(width, dim=-1).values
        kth = torch.where(ranks <= width, best.gather(1, ranks.clamp(max=width) - 1), 0.0)
        mass = torch.where(probabilities >= kth, probabilities, 0.0).sum(dim=-1, keepdim=True)
        goal = torch.where(top_p < 1, top_p, torch.inf)[:, None] * mass
        sums = best.cumsum(dim=-1)
        if width == vocabulary or bool(((sums[:, -1:] >= goal) | goal.isinf()).all()):
            break
    # A token stays while the tokens before it have not yet reached the goal.
    last = (sums - best < goal).sum(dim=-1, keepdim=True).sub(1).clamp(min=0)
    return torch.where(goal.isinf(), kth, torch.maximum(kth, best.gather(1, last)))


def top_logprobs(
    logits: torch.Tensor, chosen: SequenceOf[int], top: int
) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Log-probabilities of the `chosen` token of each row, and its `top` most probable tokens with theirs."""
    all_logprobs = torch.log_softmax(logits, dim=-1)
    tokens = torch.tensor(chosen, device=logits.device)[:, None]
    of_chosen: list[float] = all_logprobs.gather(1, tokens)[:, 0].tolist()
    best = all_logprobs.topk(min(top, logits.shape[1]), dim=-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return of_chosen, [list(zip(row_tokens, values, strict=True)) for row_tokens, values in pairs]
