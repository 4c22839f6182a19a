"""What each KV format loses, and what it costs: a trained model's own text, over pools that differ in nothing else.

    KL       of the next byte's distribution against that of the raw pool, in nats, mean over all positions
    top-1    share of positions where the likeliest byte is the same
    bits     per byte of the text, raw and in the format

Texts go through the engine's own passes: several sequences, chunks of `--chunk` tokens, blocks of `--block-size`; then
once more with single tokens, as when decoding. *Outlier*: K has two pairs of channels in every head that are
24 times as large and Q is as much smaller there, so that the model computes what it did before: real LLMs have such
channels, and a small one has none. `python bench/bench_formats.py FOLDER` (from `bench/train_tiny.py FOLDER`)
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import math
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from common import Report
from train_tiny import text_at_hand
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from tiercache.engine import EngineSettings
from tiercache.engine.attention import Batch
from tiercache.engine.kv_pool import BatchSegment, KVPool
from tiercache.engine.model import HostedModel, read_shape

FORMATS = ("fp8_e4m3", "fp8_e5m2", "int8", "int4")
LIMITS = {"fp8_e4m3": 1.0e-3, "fp8_e5m2": 3.9e-3, "int8": 2.3e-5, "int4": 3.8e-3}
"""KL of the formats in the measurements that they were chosen by, on another model of this size."""
OUTLIER_PAIRS = (2, 9)
OUTLIER_FACTOR = 24.0


class Losses(NamedTuple):
    """Against a raw pool: mean KL in nats, share of equal top-1; bits per byte of the text."""

    kl: float
    top1: float
    bits: float


def texts(count: int, length: int) -> torch.Tensor:
    """Pieces of the held-out text, int64 `[count, length]`."""
    _, held_out = text_at_hand()
    starts = torch.linspace(0, len(held_out) - length, count).long()
    return torch.stack([held_out[start : start + length] for start in starts]).long()


def save_with_outliers(folder: Path, target: Path) -> None:
    """The model of `folder` with channels of K scaled up and those of Q down by as much.

    A rotary pair is scaled alike, so nothing else changes.
    """
    model = AutoModelForCausalLM.from_pretrained(folder)
    dim = model.config.head_dim
    channels = [pair + half for pair in OUTLIER_PAIRS for half in (0, dim // 2)]
    with torch.no_grad():
        for layer in model.model.layers:
            for weight, factor in (
                (layer.self_attn.k_proj.weight, OUTLIER_FACTOR),
                (layer.self_attn.q_proj.weight, 1 / OUTLIER_FACTOR),
            ):
                weight.view(-1, dim, weight.shape[1])[:, channels] *= factor
    model.save_pretrained(target)


def load(folder: Path) -> HostedModel:
    """The model of a folder, on the CPU."""
    return HostedModel(folder, read_shape(folder, EngineSettings()), torch.device("cpu"))


def run(model: HostedModel, rows: torch.Tensor, name: str, *, size: int, chunk: int) -> tuple[torch.Tensor, float]:
    """Logits of every position, `[row, token, vocabulary]`, in passes over all rows; and the CPU seconds."""
    count, length = rows.shape
    blocks = -(-length // size)
    pool: KVPool = model.new_pool(count * blocks, size, name, count)
    tables = [list(range(row * blocks, (row + 1) * blocks)) for row in range(count)]
    parts: list[torch.Tensor] = []
    began_s = time.process_time()
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        segments = [BatchSegment(row * (end - start), start, end, table) for row, table in enumerate(tables)]
        tokens = rows[:, start:end].flatten().tolist()
        parts.append(model.forward(Batch(pool, segments), tokens, range(len(tokens))).view(count, end - start, -1))
    return torch.cat(parts, dim=1), time.process_time() - began_s


def losses(raw: torch.Tensor, logits: torch.Tensor, rows: torch.Tensor) -> Losses:
    """Loss of logits against those of the raw pool."""
    base, other = raw.float().log_softmax(-1), logits.float().log_softmax(-1)
    kl = (base.exp() * (base - other)).sum(-1).mean()
    top1 = (base.argmax(-1) == other.argmax(-1)).float().mean()
    bits = -other[:, :-1].gather(-1, rows[:, 1:, None]).mean() / math.log(2)
    return Losses(float(kl), float(top1), float(bits))


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=32)
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    report = Report("bench_formats")
    rows = texts(args.texts, args.length)
    outliers = tempfile.TemporaryDirectory()
    save_with_outliers(args.folder, Path(outliers.name))
    for kind, folder in (("natural", args.folder), ("outlier", Path(outliers.name))):
        model = load(folder)
        shape, raw_bytes = model.shape, model.shape.kv_layout(args.block_size).block_bytes
        raw, raw_s = run(model, rows, "auto", size=args.block_size, chunk=args.chunk)
        raw_single, raw_single_s = run(model, rows[:4], "auto", size=args.block_size, chunk=1)
        report.add(f"bits_raw_{kind}", f"{kind}: bits per byte, raw", losses(raw, raw, rows).bits)
        for name in FORMATS:
            logits, took_s = run(model, rows, name, size=args.block_size, chunk=args.chunk)
            found = losses(raw, logits, rows)
            report.add(f"kl_{name}_{kind}", f"{kind}: KL of {name}", found.kl, "nats", at_most=LIMITS[name])
            report.add(f"top1_{name}_{kind}", f"{kind}: top-1 of {name}", 100 * found.top1, "%")
            report.add(f"bits_{name}_{kind}", f"{kind}: bits per byte, {name}", found.bits)
            single, single_s = run(model, rows[:4], name, size=args.block_size, chunk=1)
            report.add(
                f"kl_decode_{name}_{kind}",
                f"{kind}: KL of {name}, a token at a time",
                losses(raw_single, single, rows[:4]).kl,
                "nats",
            )
            if kind == "natural":
                ratio = 2 * raw_bytes / shape.dtype.itemsize / shape.kv_layout(args.block_size, name).block_bytes
                report.add(f"tokens_{name}", f"tokens in the memory of a 16-bit pool, {name}", ratio, "x")
                report.add(f"prefill_cpu_{name}", f"CPU of a pass over raw, {name}", took_s / raw_s, "x")
                report.add(f"decode_cpu_{name}", f"CPU of single tokens over raw, {name}", single_s / raw_single_s, "x")
    outliers.cleanup()
    report.finish()


if __name__ == "__main__":
    main()
