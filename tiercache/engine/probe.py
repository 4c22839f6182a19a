"""Tests whether a model computes the same over paged KV as on its own, and finds how it rotates its queries.

transformers runs any model that a folder names. A model that keeps state besides its K and V would produce fluent,
wrong text. So every model is tested at load: two sequences, packed, in uneven chunks, on scattered blocks, against one
pass each of the model's own attention.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import torch

from tiercache.engine.attention import NAME, Batch
from tiercache.engine.kv_pool import BatchSegment, KVPool
from tiercache.engine.model import HostedModel
from tiercache.engine.settings import EngineSettings
from tiercache.engine.torch_attention import Rotation, Streaming, TorchPass
from tiercache.errors import ConfigError, ModelRefused, TierCacheError

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


# --- how a model rotates its queries -----------------------------------------------------------------

_TOKENS = 24
_STREAM_BLOCK_SIZE = 8
# Shifts at which the model is run: where angles are exact, and as far as sequences go.
_NEAR = 997
# Largest accepted difference of a layer's queries, relative to their size: nearby by dtype, far away also of angles.
_STREAM_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_FAR_TOLERANCE = 5e-2


class _Recorder(TorchPass):
    """A pass with its tokens `shift` positions further on; keeps the queries of layers without a window."""

    def __init__(self, pool: KVPool, segment: BatchSegment, shift: int) -> None:
        super().__init__(pool, [segment])
        self.positions = self.positions + shift
        self.queries: dict[int, torch.Tensor] = {}

    def attend(self, layer: int, query: torch.Tensor, *rest: Any, window: int = 0, **options: Any) -> torch.Tensor:
        if not window:
            self.queries[layer] = query.double()
        return super().attend(layer, query, *rest, window=window, **options)


def find_streaming(model: HostedModel, settings: EngineSettings) -> Streaming | None:
    """How layers without a window attend with `attention_window`; None if that is not set.

    Raises ConfigError for a model with a window in every layer, or whose queries are not turned by fixed angles.
    Takes a few passes of a few tokens.
    """
    if not settings.attention_window:
        return None
    if all(model.shape.windows):
        raise ConfigError(
            f"attention_window is {settings.attention_window}, and every layer of this model has a sliding window of "
            f"its own ({max(model.shape.windows)}): set attention_window to 0"
        )
    try:
        rotations = _find_rotations(model)
    except IndexError:  # a model with a table of positions: it ends before
        rotations = None
    if rotations is None:
        raise ConfigError(
            f"attention_window is {settings.attention_window}, and {type(model.module).__name__} does not turn its "
            "queries by position as rotary embeddings do: set attention_window to 0"
        )
    return Streaming(settings.attention_window, settings.sink_tokens, rotations)


def _find_rotations(model: HostedModel) -> dict[int, Rotation] | None:
    here, near = _queries_at(model, 0), _queries_at(model, _NEAR)
    longest = max(0, model.shape.max_context - _TOKENS)
    far = _queries_at(model, longest)
    tolerance = _STREAM_TOLERANCE[model.shape.dtype]
    rotations: dict[int, Rotation] = {}
    for layer, query in here.items():
        for rotation in _candidates(model):
            off = _difference(rotation, query, near[layer], _NEAR)
            if off <= tolerance and _difference(rotation, query, far[layer], longest) <= max(tolerance, _FAR_TOLERANCE):
                rotations[layer] = rotation
                break
        else:
            return None
    return rotations


def _queries_at(model: HostedModel, shift: int) -> dict[int, torch.Tensor]:
    """The queries of a short text at positions from `shift` on, by layer."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(model.shape.vocabulary, (_TOKENS,), generator=generator).tolist()
    pool = model.new_pool(_TOKENS // _STREAM_BLOCK_SIZE, _STREAM_BLOCK_SIZE)
    segment = BatchSegment(0, 0, _TOKENS, range(_TOKENS // _STREAM_BLOCK_SIZE))
    work = _Recorder(pool, segment, shift)
    model.forward(Batch(pool, [segment], work), tokens, [])
    return work.queries


def _candidates(model: HostedModel) -> list[Rotation]:
    """Candidates: the frequencies of the model's rotary modules, and no rotation at all."""
    buffers = {name: buffer for name, buffer in model.module.named_buffers() if name.endswith("inv_freq")}
    none = torch.zeros(0, dtype=torch.float64, device=model.device)
    return [*(Rotation(buffer.double()) for buffer in buffers.values()), Rotation(none)]


def _difference(rotation: Rotation, query: torch.Tensor, other: torch.Tensor, shift: int) -> float:
    if 2 * len(rotation.frequencies) > query.shape[-1]:
        return float("inf")
    turned = rotation.turn(query, torch.full(query.shape[-2:-1], shift, device=query.device))
    return float((turned - other).norm() / other.norm())
