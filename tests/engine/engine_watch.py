"""Runs an engine with its books checked after every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tiercache.engine import Engine, RequestOutput, SamplingParams


def plain_prompt(length: int, seed: int = 0) -> list[int]:
    """Tokens for a `PlainModel`."""
    return [1 + (seed * 17 + position * position) % 48 for position in range(length)]


def greedy(count: int, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=count, n=n, ignore_eos=True)


class Watch:
    """Runs requests to their end, checking the books after each step, and notes the most blocks in use."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.most_in_use = 0
        self.most_in_group = [0] * len(engine._groups.groups)

    def run(self) -> dict[int, list[RequestOutput]]:
        outputs: dict[int, list[RequestOutput]] = {}
        for _ in range(5000):
            if not self.engine.unfinished:
                return outputs
            for step in self.engine.step():
                if step.output is not None:
                    outputs.setdefault(step.request_id, []).append(step.output)
            self.engine.check_integrity()  # that no sequence holds more than it may, among others
            in_use = self.engine.stats()["pool_blocks"] - self.engine.stats()["idle_blocks"]
            self.most_in_use = max(self.most_in_use, int(in_use))
            for sequence in self.engine._alive:
                held = [len(table.held) for table in sequence.tables]
                self.most_in_group = [max(pair) for pair in zip(self.most_in_group, held, strict=True)]
        raise AssertionError("the engine does not come to an end")

    def serve(self, prompt: list[int], count: int) -> RequestOutput:
        request_id = self.engine.add_request(prompt, greedy(count))
        return self.run()[request_id][0]


def generated(folder: Path, prompt: list[int], count: int) -> list[int]:
    """The tokens that transformers generates."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def record_logits(engine: Engine) -> list[torch.Tensor]:
    """The logits of every forward pass from here on, as the engine sees them."""
    seen: list[torch.Tensor] = []
    forward = engine._model.forward

    def recording(*args: Any) -> torch.Tensor:
        seen.append(forward(*args))
        return seen[-1]

    engine._model.forward = recording  # type: ignore[method-assign]
    return seen


def run_checked(engine: Engine) -> dict[int, RequestOutput]:
    """Step to the end and check the books after each step."""
    outputs: dict[int, RequestOutput] = {}
    for _ in range(1000):
        if not engine.unfinished:
            return outputs
        for output in engine.step():
            if output.output is not None:
                outputs[output.request_id] = output.output
        engine.check_integrity()
    raise AssertionError("the engine does not come to an end")
