"""What the formats lose on a model that has learnt a little, by the benchmark's own measure.

The bounds are three to four times what a right format loses here; a lost bit loses ten times as much.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.engine
BENCH = Path(__file__).resolve().parents[2] / "bench"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1}
BOUNDS = {"fp8_e4m3": 3e-4, "fp8_e5m2": 6e-4, "int8": 4e-6, "int4": 1e-3}


@pytest.fixture(scope="module")
def bench() -> Any:
    """The two programs, as modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        import bench_formats
        import train_tiny

        yield bench_formats, train_tiny
        for name in ("bench_formats", "train_tiny", "common"):
            sys.modules.pop(name, None)


def trained(train_tiny: ModuleType, steps: int) -> Any:
    text, _ = train_tiny.text_at_hand()
    training = train_tiny.Training(train_tiny.new_model(**SIZES), text, steps=150, batch=8, context=64)
    for _ in range(steps):
        training.run_step()
    return training


@pytest.fixture(scope="module")
def folder(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained")
    trained(bench[1], 150).save(path)
    return path


def test_what_the_formats_lose_is_within_bounds(bench: Any, folder: Path, tmp_path: Path) -> None:
    bench_formats, _ = bench
    rows = bench_formats.texts(4, 112)
    bench_formats.save_with_outliers(folder, tmp_path)
    plain: torch.Tensor | None = None
    for kind, path in (("natural", folder), ("outlier", tmp_path)):
        model = bench_formats.load(path)
        raw, _ = bench_formats.run(model, rows, "auto", size=16, chunk=24)
        plain = raw if plain is None else plain
        torch.testing.assert_close(raw, plain, rtol=1e-3, atol=1e-3)  # outliers change nothing but K and Q
        for name, bound in BOUNDS.items():
            logits, _ = bench_formats.run(model, rows, name, size=16, chunk=24)
            found = bench_formats.losses(raw, logits, rows)
            assert found.bits < 4.6  # of 8: it has learnt something
            assert 1e-8 < found.kl < bound, (kind, name)
            assert found.top1 > 0.9, (kind, name)


def test_a_resumed_training_is_the_same_training(bench: Any, tmp_path: Path) -> None:
    train_tiny = bench[1]
    whole = trained(train_tiny, 6)
    trained(train_tiny, 3).save(tmp_path)
    resumed = trained(train_tiny, 0)
    resumed.load(tmp_path)
    assert resumed.step == 3
    for _ in range(3):
        resumed.run_step()
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
