"""The outputs of an engine."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tiercache.engine.sampling import TokenLogprobs
from tiercache.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of a request, or of sequence `index` of its `n` sequences.

    `finish_reason` is `stop` (an end token), `length` or `abort`. Tokens of the prompt were found in the
    engine's pool (`pool_hit_tokens`), loaded from the cache (`external_hit_tokens`) or computed (the rest).
    """

    request_id: int
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    pool_hit_tokens: int
    external_hit_tokens: int
    ttft_s: float
    latency_s: float
    index: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """A new token of sequence `index` of a request; `output` is set with the last token.

    `logprobs` is set if the request asked for it.
    """

    request_id: int
    token: int
    output: RequestOutput | None
    index: int
    logprobs: TokenLogprobs | None = None


def output_of(sequence: Sequence) -> RequestOutput:
    """The output of a sequence that has just ended."""
    now_s = time.perf_counter()
    return RequestOutput(
        request_id=sequence.request_id,
        tokens=sequence.output,
        finish_reason=sequence.finish_reason,
        prompt_tokens=sequence.prompt_count,
        pool_hit_tokens=sequence.pool_hit_tokens,
        external_hit_tokens=sequence.external_hit_tokens,
        ttft_s=(sequence.first_token_s or now_s) - sequence.arrived_s,
        latency_s=now_s - sequence.arrived_s,
        index=sequence.index,
    )
