"""The bundled engine beside transformers: the same weights, prompts and batch, and one thread each.

`generate` pads a batch and computes until all of it is done; `generate_batch` is transformers' own continuous
batching. A decode step is the time between two forward passes over one token of each sequence, in
seconds of this process's CPU, so that other work on the machine counts little. What `generate_batch` takes to set up
its cache is not in it, and the cache is as large as the batch needs: by default it claims nine tenths of the
machine's memory, which takes half a minute.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import Report
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from tiercache.engine import Engine, EngineSettings, SamplingParams

BATCHES = (8, 32)
CONTEXTS = {"20M": 512, "100M": 256}
"""Tokens of a prompt before decoding, by the model's size; fewer where a prefill of 32 would take a minute."""
PREFILL = 2048
STEPS = 16
TURNS = 3
"""Of engine and `generate` in a round, so that both meet the same machine: it may be a third faster a second later."""
PAGE = 256
BATCH_TOKENS = 2048
median = statistics.median


class Stock:
    """A model as transformers runs it."""

    def __init__(self, model: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model).eval()
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # the warning that psutil is missing

    def generate(self, prompts: list[list[int]], count: int) -> None:
        inputs = torch.tensor(prompts)
        with torch.inference_mode():
            self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                min_new_tokens=count,
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )

    def generate_batch(self, prompts: list[list[int]], count: int) -> None:
        context = len(prompts[0])
        # Prompts enter as a step has room for them: the first must still be decoding when the last one begins to.
        count += -(-len(prompts) * context // BATCH_TOKENS)
        pages = -(-(context + count) // PAGE) + 1
        self._model.generate_batch(
            prompts,
            generation_config=GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE, num_blocks=len(prompts) * pages, max_batch_tokens=BATCH_TOKENS
            ),
        )

    def decode_steps(self, run: Callable[[list[list[int]], int], None], prompts: list[list[int]]) -> list[float]:
        """CPU seconds of each step of `run` in which all sequences decode."""
        with self._watched() as passes:
            run(prompts, STEPS + 2)
        each = pairwise(passes)
        steps = [end - start for (start, before), (end, tokens) in each if before == tokens == len(prompts)]
        if len(steps) < STEPS // 2:
            raise RuntimeError(f"only {len(steps)} steps in which all {len(prompts)} sequences decode")
        return steps

    @contextmanager
    def _watched(self) -> Iterator[list[tuple[float, int]]]:
        """When each forward pass began, in CPU seconds, and over how many tokens."""
        passes: list[tuple[float, int]] = []

        def note(_: object, __: object, inputs: dict[str, Any]) -> None:
            passes.append((time.process_time(), inputs["input_ids"].numel()))

        hook = self._model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield passes
        finally:
            hook.remove()


def engine_steps(engine: Engine, prompts: list[list[int]]) -> list[float]:
    """CPU seconds of each step in which all sequences decode."""
    steps: list[float] = []
    ids = [engine.add_request(prompt, SamplingParams(max_tokens=1024, ignore_eos=True)) for prompt in prompts]
    while len(steps) < STEPS:
        began_s = time.process_time()
        if len(engine.step()) == len(prompts):
            steps.append(time.process_time() - began_s)
    for request_id in ids:
        engine.abort(request_id)
    return steps


def measure(report: Report, model: Path, text: list[int], size: str, rounds: int) -> None:
    """Figures of one model; keys end in the name of its size unless that is 20M."""
    place = "" if size == "20M" else f"_{size.lower()}"
    stock = Stock(model)
    with Engine(model, EngineSettings(kv_cache_memory="1GiB")) as engine:
        for batch in BATCHES:
            prompts = [[number, *text[: CONTEXTS[size] - 1]] for number in range(batch)]
            for name, run, least in (("generate", stock.generate, 1.0), ("generate_batch", stock.generate_batch, 5.0)):
                turns = rounds * (TURNS if run == stock.generate else 1)
                ratios = [_decode(stock, run, engine, prompts) for _ in range(turns)]
                key, label = f"decode_b{batch}_over_{name}{place}", f"{size}: decode, batch {batch} / {name}()"
                report.add(key, label, median(ratios), "x", at_least=least, samples=ratios)
        turns = rounds * TURNS
        ratios = [_prefill(stock, engine, [[number, *text[: PREFILL - 1]]]) for number in range(turns + 1)][1:]
        key, label = f"prefill_over_generate{place}", f"{size}: prefill of {PREFILL} / generate()"
        report.add(key, label, median(ratios), "x", at_least=0.95, samples=ratios)


def _decode(
    stock: Stock, run: Callable[[list[list[int]], int], None], engine: Engine, prompts: list[list[int]]
) -> float:
    """transformers' CPU seconds for a step of `run`, over ours."""
    return median(stock.decode_steps(run, prompts)) / median(engine_steps(engine, prompts))


def _prefill(stock: Stock, engine: Engine, prompts: list[list[int]]) -> float:
    """transformers' CPU seconds for one token, over ours."""
    engine.reset_pool()
    began_s = time.process_time()
    stock.generate(prompts, 1)
    between_s = time.process_time()
    engine.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
    return (between_s - began_s) / (time.process_time() - between_s)
