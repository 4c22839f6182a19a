"""Sampling: from logits to the next token, per request."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tiercache.errors import ConfigError

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_TOKENS = 1024
MAX_LOGIT_BIASES = 1024
# Below this a division by the temperature could overflow; the most probable token wins anyway.
_GREEDY_BELOW = 1e-5
# Characters of a wrong value that a message shows.
_SHOWN = 60


# Sorting a whole vocabulary takes longer than a small model's step. This many of the most probable tokens
# nearly always reach `top_p`; if they do not, all are sorted.
_CANDIDATES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request. Raises ConfigError when a value is wrong.

    Names and meanings are vLLM's. Penalties and biases change the logits, then temperature, `min_p`, `top_k`
    and `top_p` apply, in this order; tokens that tie at a limit all stay.

    Attributes:
        n: sequences to generate from one prefill of the prompt. With a seed, each gets its own, derived from it.
        max_tokens: tokens to generate at most.
        min_tokens: tokens before which nothing ends the request: end tokens are not chosen,
            stop strings are not looked for.
        temperature: 0 is greedy.
        top_p: sample from the smallest set of tokens with at least this probability.
        top_k: sample from this many most probable tokens; 0 is all.
        min_p: leave out tokens less probable than this share of the most probable one's probability.
        presence_penalty: subtracted from the logit of each token generated before.
        frequency_penalty: subtracted once for each time that the token was generated.
        repetition_penalty: logits of tokens in prompt and output are divided by it (multiplied if negative).
        logit_bias: added to the logits of these tokens.
        seed: makes the choice repeatable; None draws a seed.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
        stop_token_ids: further tokens to stop at. The token stopped at is part of the output.
        stop: texts to stop at, left out of the output. Not for `Engine`, which has no tokenizer.
        logprobs: report the log-probability of each token by the model itself (before penalties and
          temperature), and those of so many most probable tokens; None for neither.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, good, wanted in self._rules():
            if not good:
                value = repr(getattr(self, name))
                shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
                raise ConfigError(f"{name} is {shown}: must be {wanted}")

    def _rules(self) -> list[tuple[str, bool, str]]:
        """Every field that can be wrong: its name, whether it is valid, the valid values."""
        biases = self.logit_bias.values()
        return [
            ("n", self.n >= 1, "at least 1"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"0 to max_tokens ({self.max_tokens})"),
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (all) or more"),
            ("min_p", 0 <= self.min_p <= 1, "0 to 1"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "-2 to 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "-2 to 2"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0 (1: none)"),
            ("logit_bias", all(-100 <= bias <= 100 for bias in biases), "token ids with biases of -100 to 100"),
            ("logit_bias", len(biases) <= MAX_LOGIT_BIASES, f"at most {MAX_LOGIT_BIASES} tokens"),
            ("stop", all(self.stop) and len(self.stop) <= MAX_STOPS, f"at most {MAX_STOPS} texts, none empty"),
            ("stop_token_ids", len(self.stop_token_ids) <= MAX_STOP_TOKENS, f"at most {MAX_STOP_TOKENS} tokens"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
        ]


class TokenLogprobs(NamedTuple):
    """The log-probability of a token, and those of the most probable ones as (token, log-probability)."""

    logprob: float
    top: list[tuple[int, float]]


class Choice(NamedTuple):
    """The next token of a sequence; `logprobs` if requested."""

    token: int
    logprobs: TokenLogprobs | None


class Sampler:
    """The state, besides the logits, that determines the choice of a sequence's next token.

    Two samplers with equal arguments choose alike in any batch.

    Attributes:
        generated: tokens chosen so far.
        penalised: whether `counts` matters.
        counts: how often each token was chosen; with a repetition penalty also the prompt's tokens, as 0.
    """

    def __init__(self, params: SamplingParams, prompt: SequenceOf[int] = ()) -> None:
        self.params = params
        self.generated = 0
        self._random = random.Random(params.seed)
        self.counts: Counter[int] = Counter()
        self.penalised = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)
        if params.repetition_penalty != 1:
            self.counts.update(dict.fromkeys(prompt, 0))

    @property
    def greedy(self) -> bool:
        return self.params.temperature < _GREEDY_BELOW

    @property
    def plain(self) -> bool:
        """True if the most probable token is chosen from unchanged logits."""
        waits = self.generated < self.params.min_tokens
        return self.greedy and not (self.penalised or self.params.logit_bias or waits)

    def uniform(self) -> float:
        """The next random number, 0 to 1."""
        return self._random.random()

    def took(self, token: int) -> None:
        """Record the chosen token."""
        self.generated += 1
        if self.penalised:
            self.counts[token] += 1


def choose(logits: torch.Tensor, samplers: SequenceOf[Sampler], end_tokens: Collection[int] = ()) -> list[Choice]:
    """The next token of each row of `logits` `[rows, vocabulary]`, which stays unchanged. Waits for the device.

    `end_tokens` are the model's own.
    """
    with torch.inference_mode():
        chosen = _choose_tokens(logits, samplers, end_tokens)
        logprobs = _logprobs(logits, samplers, chosen)
    for sampler, token in zip(samplers, chosen, strict=True):
        sampler.took(token)
    return [Choice(token, logprobs.get(row)) for row, token in enumerate(chosen)]


def _choose_tokens(logits: torch.Tensor, samplers: SequenceOf[Sampler], end_tokens: Collection[int]) -> list[int]:
    special = [row for row, sampler in enumerate(samplers) if not sampler.plain]
    best = logits.argmax(dim=-1)
    if special:
        some = [samplers[row] for row in special]
        values = logits[special].float()
        change(values, *_changes(some, end_tokens))
        found = values.argmax(dim=-1)
        drawn = [row for row, sampler in enumerate(some) if not sampler.greedy]
        if drawn:
            found[drawn] = _draw(values[drawn], [some[row] for row in drawn])
        best[special] = found
    chosen: list[int] = best.tolist()
    return chosen


def _draw(values: torch.Tensor, samplers: SequenceOf[Sampler]) -> torch.Tensor:
    params = [sampler.params for sampler in samplers]
    limits = Limits(
        temperature=[one.temperature for one in params],
        min_p=[one.min_p for one in params],
        top_k=[min(one.top_k, values.shape[1]) for one in params],  # clients send large numbers for "all"
        top_p=[one.top_p for one in params],
    )
    return draw(values, limits, [sampler.uniform() for sampler in samplers])


def _changes(samplers: SequenceOf[Sampler], end_tokens: Collection[int]) -> tuple[Changes, Changes]:
    """The factors and the summands of the logits, per row."""
    scale, add = Changes(), Changes()
    for row, sampler in enumerate(samplers):
        params = sampler.params
        if params.repetition_penalty != 1:
            scale.extend(row, sampler.counts, [params.repetition_penalty] * len(sampler.counts))
        if params.presence_penalty or params.frequency_penalty:
            used = {token: count for token, count in sampler.counts.items() if count}
            add.extend(row, used, [-params.presence_penalty - params.frequency_penalty * n for n in used.values()])
        add.extend(row, params.logit_bias, list(params.logit_bias.values()))
        if sampler.generated < params.min_tokens:
            ends = {*params.stop_token_ids, *(() if params.ignore_eos else end_tokens)}
            add.extend(row, ends, [-math.inf] * len(ends))
    return scale, add


def _logprobs(logits: torch.Tensor, samplers: SequenceOf[Sampler], chosen: list[int]) -> dict[int, TokenLogprobs]:
    """Log-probabilities by row, for rows that requested them."""
    rows = [row for row, sampler in enumerate(samplers) if sampler.params.logprobs is not None]
    if not rows:
        return {}
    most = max(samplers[row].params.logprobs or 0 for row in rows)
    of_chosen, top = top_logprobs(logits[rows].float(), [chosen[row] for row in rows], most)
    return {
        row: TokenLogprobs(logprob, pairs[: samplers[row].params.logprobs])
        for row, logprob, pairs in zip(rows, of_chosen, top, strict=True)
    }


# --- arithmetic on logits: batches [rows, vocabulary] of float32, on any device ------------------------


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
