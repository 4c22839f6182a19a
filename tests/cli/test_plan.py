"""`tiercache plan`: what the tiers hold, whether a load pays, and one line for what cannot be planned."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from command_line import DEADLINE_S, Run, assert_refused

from tiercache.plan.model import load_model

Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def plan(run: Run) -> Plan:
    """The plan as a tree; arguments as one line."""

    def one(line: str) -> dict[str, Any]:
        status, out, err = run("plan", "--json", *line.split())
        assert (status, err) == (0, "")
        found: dict[str, Any] = json.loads(out)
        return found

    return one


def test_what_the_tiers_hold(plan: Plan) -> None:
    found = plan("Llama-3.1-8B --gpu 80GiB --dram 64GiB --nvme 1TiB --tokens-per-s 1000 --length 4096")
    assert found["kv"]["tier_block_bytes"] == 2 << 20
    pool_bytes = int((80 << 30) * 0.9) - found["model"]["weights_bytes"] - (2 << 30)
    blocks = pool_bytes // (2 << 20)
    assert (found["gpu"]["pool_bytes"], found["gpu"]["pool_tokens"]) == (pool_bytes, blocks * 16)
    assert [one["tokens"] for one in found["tiers"]] == [blocks * 16, 524288, 8388608]
    assert found["tiers"][1]["holds_s"] == 524.288
    [sequence] = found["sequences"]
    assert (sequence["bytes"], sequence["in_dram"], sequence["in_nvme"]) == (512 << 20, 128, 2048)
    assert sequence["in_gpu"] == pool_bytes // (512 << 20)


def test_load_or_compute(plan: Plan) -> None:
    rates = "--tflops 100 --mfu 0.5 --bus 10GB --dram-bandwidth 5GB/s --nvme-bandwidth 1GB"
    [one] = plan(f"Llama-3.1-8B {rates} --length 8192")["loads"]
    assert one["compute_s"] == pytest.approx(load_model("Llama-3.1-8B").prefill_flops(8192) / 50e12)
    assert (one["bytes"], one["dram_s"], one["nvme_s"]) == (1 << 30, (1 << 30) / 5e9, (1 << 30) / 1e9)
    assert one["break_even_bytes_per_s"] * one["compute_s"] == pytest.approx(1 << 30)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Llama-3.1-7B", ["did you mean Llama-3.1-70B", "config.json"]),
        ("zzz", ["known are Llama-3.1-8B", "config.json"]),
        ("Qwen3-8B --gpu H10", ["did you mean H100", "--gpu 80GiB"]),
        ("Qwen3-8B --gpu 80sheep", ["--gpu", "16GiB"]),
        ("Qwen3-8B --dram much", ["--dram", "16GiB"]),
        ("Llama-3.1-70B", ["131.4 GiB", "--tensor-parallel-size 2"]),
        ("DeepSeek-V3 --gpu L4", ["--tensor-parallel-size 32"]),
        ("Llama-3.1-70B --tensor-parallel-size 3", ["64 attention heads", "divides"]),
        ("DeepSeek-V3 --weights 1GiB --kv-cache-dtype int4", ["latent", "--kv-cache-dtype auto"]),
        ("Qwen3-8B --kv-cache-dtype int3", ["int3", "auto, bf16, fp8, int8, int4"]),
        ("Qwen3-8B --mfu 2", ["--mfu 2", "0.5"]),
        ("Qwen3-8B --gpu-memory-utilization 0", ["--gpu-memory-utilization 0"]),
        ("Qwen3-8B --requests-per-s 2", ["one --length"]),
        ("Qwen3-8B --tokens-per-s 1 --requests-per-s 2", ["either"]),
        ("Qwen3-8B --tokens-per-s 0", ["more than 0"]),
        ("Qwen3-8B --length 0", ["--length"]),
        ("Qwen3-8B --bus 0", ["--bus 0", "more than 0"]),
        ("Qwen3-8B --shared 20x", ["--shared", "16GiB"]),
        ("Qwen3-8B --shared-bandwidth 0Gbit/s", ["--shared-bandwidth 0Gbit/s", "more than 0"]),
        ("Qwen3-8B --shared-round-trip soon", ["--shared-round-trip", "250ms"]),
    ],
)
def test_what_cannot_be_planned_is_one_line(run: Run, line: str, words: list[str]) -> None:
    assert_refused(run("plan", *line.split()), *words)


def test_neither_torch_nor_numpy_is_needed() -> None:
    code = "import sys; from tiercache.cli.main import main; main(['plan', 'Qwen3-8B', '--json']);"
    code += "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
