"""Tests whether a model computes the same over paged KV as on its own.

transformers runs any model that a folder names. A model that keeps state besides its K and V would produce fluent,
wrong text. So every model is tested at load: two sequences, packed, in uneven chunks, on scattered blocks, against one
pass each of the model's own attention.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import torch

from tiercache.engine.attention import NAME, Batch
from tiercache.engine.kv_pool import BatchSegment
from tiercache.engine.model import HostedModel
from tiercache.errors import ModelRefused, TierCacheError

_BLOCK_SIZE = 16
_LENGTHS = (101, 67)
# Ends of the chunks of a sequence, as parts of its length: uneven, a single token, and large again.
_ENDS = (0.31, 0.32, 0.83, 0.99, 1.0)
# Longest sliding window for which the sequences are made long enough to leave it.
_MAX_TRIED_WINDOW = 512
# Largest accepted difference of a token's logits, relative to their spread (root mean squares).
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


class Trial(NamedTuple):
    """The result of the paged passes: logits of each prompt, `[token, vocabulary]`; see `Batch` for the rest."""

    logits: list[torch.Tensor]
    windows: dict[int, int]
    plain: bool


def check_model(model: HostedModel) -> None:
    """Raises ModelRefused with one line if the paged result differs. Takes passes of ~100 tokens."""
    shape = model.shape
    tried = [window for window in shape.windows if 0 < window <= _MAX_TRIED_WINDOW]
    lengths = [min(length + max(tried, default=0), shape.max_context) for length in _LENGTHS]
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(shape.vocabulary, (length,), generator=generator).tolist() for length in lengths]
    try:
        trial = _run_paged(model, prompts)
        for prompt, logits in zip(prompts, trial.logits, strict=True):
            # transformers' sdpa may silently leave out what it does not support.
            stock = _stock_logits(model, prompt, ("sdpa", "eager") if trial.plain else ("eager",))
            _compare(model, logits, stock)
    except TierCacheError:
        raise
    except Exception as error:
        # Any error of a strange model's code means that the model cannot be served.
        line = (str(error).strip().splitlines() or [""])[0]
        kind = type(error).__name__
        raise ModelRefused(f"{_name(model)} does not run on paged KV: {kind}: {line}") from error
    if sorted(trial.windows) != list(range(shape.layers)):
        raise ModelRefused(
            f"{_name(model)} calls transformers' attention interface in {len(trial.windows)} of {shape.layers} "
            "layers: only models that do so in every layer are served"
        )
    for layer, window in enumerate(shape.windows):
        if trial.windows[layer] != window:
            raise ModelRefused(
                f"{_name(model)} has a sliding window of {window} in layer {layer} by its config and of "
                f"{trial.windows[layer]} by its code: not served"
            )


def _name(model: HostedModel) -> str:
    return type(model.module).__name__


def _run_paged(model: HostedModel, prompts: list[list[int]]) -> Trial:
    """Compute all logits of the prompts, packed and in chunks."""
    needed = [-(-len(prompt) // _BLOCK_SIZE) for prompt in prompts]
    pool = model.new_pool(sum(needed), _BLOCK_SIZE)
    # Every other block, so that no two blocks of a sequence are adjacent.
    order = [*range(0, sum(needed), 2), *range(1, sum(needed), 2)]
    tables = [order[: needed[0]], order[needed[0] :]]
    done = [0] * len(prompts)
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    windows: dict[int, int] = {}
    plain = True
    for part in _ENDS:
        ends = [int(len(prompt) * part) for prompt in prompts]
        segments: dict[int, BatchSegment] = {}
        tokens: list[int] = []
        for number, (prompt, start, end) in enumerate(zip(prompts, done, ends, strict=True)):
            if end > start:
                segments[number] = BatchSegment(len(tokens), start, end, tables[number])
                tokens += prompt[start:end]
        batch = Batch(pool, list(segments.values()))
        logits = model.forward(batch, tokens, range(len(tokens)))
        windows |= batch.windows
        plain &= batch.plain
        for number, segment in segments.items():
            parts[number].append(logits[segment.row : segment.row + segment.end - segment.start])
        done = ends
    return Trial([torch.cat(part) for part in parts], windows, plain)


def _stock_logits(model: HostedModel, prompt: list[int], implementations: tuple[str, ...]) -> torch.Tensor:
    """The model's own logits, `[token, vocabulary]`, with the first implementation that it accepts."""
    inputs = torch.tensor([prompt], device=model.device)
    try:
        for implementation in implementations[:-1]:
            with suppress(ValueError):
                return _run_stock(model, inputs, implementation)
        return _run_stock(model, inputs, implementations[-1])
    finally:
        model.module.set_attn_implementation(NAME)


def _run_stock(model: HostedModel, inputs: torch.Tensor, implementation: str) -> torch.Tensor:
    model.module.set_attn_implementation(implementation)
    with torch.inference_mode():
        logits: torch.Tensor = model.module(input_ids=inputs, use_cache=False).logits[0]
    return logits


def _compare(model: HostedModel, paged: torch.Tensor, stock: torch.Tensor) -> None:
    paged, stock = paged.float(), stock.float()
    spread = (stock - stock.mean(dim=-1, keepdim=True)).square().mean().sqrt()
    worst = ((paged - stock).square().mean(dim=-1).sqrt() / spread).max().item()
    tolerance = _TOLERANCE[model.shape.dtype]
    if not worst <= tolerance:
        raise ModelRefused(
            f"{_name(model)} computes other logits over paged KV than by itself (off by {worst:.2g} of their "
            f"spread, {tolerance:g} is allowed): it keeps state besides K and V, and is not served"
        )
