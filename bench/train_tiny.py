"""Trains a Llama of 4.5M parameters on the text that comes with Python, for what needs one that has learnt something.

Byte-level; ten minutes on one core give about 2.7 bits per byte: shaped like text, and no sense. Every
`--save-every` seconds, and when interrupted, it is saved as a Hugging Face folder with the state of its
training beside it; the same command goes on from there. `python bench/train_tiny.py FOLDER [--steps N]`
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import SEED, Report

STATE_FILE = "training.pt"
CONTEXT = 256
BATCH = 8
STEPS = 500
LEARNING_RATE = 3e-3
WARMUP_STEPS = 20
HELD_OUT_EVERY = 20  # every 20th file is for the test
SMALL: dict[str, int] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""4.5M parameters, with heads of 64."""


def text_at_hand() -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to train on and bytes to test on, uint8: Python's own documents and sources."""
    from pydoc_data.topics import topics

    folder = Path(sysconfig.get_path("stdlib"))
    sources = [path.read_bytes() for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py"))[:300]]
    pages = [topics[name].encode() for name in sorted(topics)] * 2 + sources
    held_out = b"\n\n".join(pages[::HELD_OUT_EVERY])
    known = b"\n\n".join(page for number, page in enumerate(pages) if number % HELD_OUT_EVERY and page not in held_out)
    return tuple(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (known, held_out))  # type: ignore[return-value]


def new_model(**changes: int) -> Any:
    """An untrained Llama for bytes; `changes` to its size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        **(SMALL | changes),
        vocab_size=257,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=256,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


class Training:
    """A model in training. Each step depends on its number alone, so a resumed run repeats an uninterrupted one."""

    def __init__(
        self, model: Any, text: torch.Tensor, *, steps: int, batch: int = BATCH, context: int = CONTEXT
    ) -> None:
        self.model = model
        self.step = 0
        self._text, self._steps, self._shape = text, steps, (batch, context)
        matrices = [one for one in model.parameters() if one.dim() == 2]
        others = [one for one in model.parameters() if one.dim() != 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))

    def run_step(self) -> float:
        """One step; returns the loss in bits per byte."""
        batch, context = self._shape
        generator = torch.Generator().manual_seed(SEED + self.step)
        starts = torch.randint(len(self._text) - context - 1, (batch,), generator=generator)
        rows = torch.stack([self._text[start : start + context + 1] for start in starts]).long()
        warm = min(1.0, (self.step + 1) / WARMUP_STEPS)
        rate = LEARNING_RATE * warm * (0.1 + 0.9 * (1 + math.cos(math.pi * self.step / self._steps)) / 2)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        logits = self.model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return float(loss.detach()) / math.log(2)

    def save(self, folder: Path) -> None:
        """Write the model, and what is needed to go on; the old files stay whole until the new ones are."""
        self.model.save_pretrained(folder)
        state = {"step": self.step, "model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}
        torch.save(state, folder / (STATE_FILE + ".new"))
        (folder / (STATE_FILE + ".new")).replace(folder / STATE_FILE)

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, if anything."""
        if (folder / STATE_FILE).exists():
            state = torch.load(folder / STATE_FILE, weights_only=True)
            self.model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]


@torch.inference_mode()
def bits_per_byte(model: Any, text: torch.Tensor, *, windows: int = 16, context: int = CONTEXT) -> float:
    """Mean loss over `windows` pieces that are spread over a text."""
    starts = torch.linspace(0, len(text) - context - 1, windows).long()
    rows = torch.stack([text[start : start + context + 1] for start in starts]).long()
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return float(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())) / math.log(2)


def train(folder: Path, steps: int, save_every_s: float = 60.0) -> Training:
    """Train up to `steps` steps in all, from where `folder` stands, and save there."""
    known, held_out = text_at_hand()
    training = Training(new_model(), known, steps=steps)
    training.load(folder)
    began_s = saved_s = time.perf_counter()
    first = training.step
    try:
        while training.step < steps:
            loss = training.run_step()
            now_s = time.perf_counter()
            if training.step % 20 == 0:
                pace_s = (now_s - began_s) / (training.step - first)
                test = bits_per_byte(training.model, held_out)
                figures = f"{loss:.3f} bits per byte, held out {test:.3f}  {pace_s:.2f} s a step"
                print(f"step {training.step:5}  {figures}", flush=True)
            if now_s - saved_s > save_every_s:
                training.save(folder)
                saved_s = now_s
    finally:
        training.save(folder)
    return training


def main() -> None:
    """Train and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--save-every", type=float, default=60.0, metavar="SECONDS")
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("train_tiny")
    training = train(args.folder, args.steps, args.save_every)
    _, held_out = text_at_hand()
    parameters = sum(one.numel() for one in training.model.parameters())
    held_out_bits = bits_per_byte(training.model, held_out, windows=64)
    report.add("bits_per_byte", "held-out text", held_out_bits, "bits/byte", at_most=2.8)
    report.add("parameters", "parameters", parameters)
    report.add("steps", "steps, all runs", training.step)
    report.finish()


if __name__ == "__main__":
    main()
