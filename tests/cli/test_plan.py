"""`tiercache plan`: sizes of known models, work, tiers, and one line for what cannot be planned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiercache.cli.main import main
from tiercache.plan.known import GPUS, MODELS
from tiercache.plan.model import load_model, read_config, record_bytes
from tiercache.plan.sizes import Form

KIB = 1024


def token_bytes(name: str, dtype: str = "auto") -> float:
    return Form(load_model(name), dtype, 16, 1).token_bytes


# --- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("Llama-3.1-8B", 128 * KIB),
        ("Llama-3.1-70B", 320 * KIB),
        ("Qwen3-8B", 144 * KIB),
        ("Qwen3-32B", 256 * KIB),
        ("Qwen3-30B-A3B", 96 * KIB),
        ("Mistral-7B-v0.1", 128 * KIB),
        ("Mixtral-8x7B", 128 * KIB),
        ("Gemma3-27B", 496 * KIB),
        ("gpt-oss-20b", 48 * KIB),
        ("gpt-oss-120b", 72 * KIB),
        ("DeepSeek-V3", 576 * 2 * 61),
        ("Qwen3-Next-80B-A3B", 24 * KIB),
        ("LFM2-1.2B", 12 * KIB),
        ("Jamba-v0.1", 16 * KIB),
        ("Phi-3-mini", 384 * KIB),
    ],
)
def test_a_token_of_a_known_model(name: str, size: int) -> None:
    assert token_bytes(name) == size


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("Llama-3.1-8B", 8.03, 7.0),
        ("Llama-3.1-70B", 70.6, 68.5),
        ("Qwen3-8B", 8.19, 6.95),
        ("Qwen3-32B", 32.8, 31.2),
        ("Qwen3-30B-A3B", 30.5, 2.7),
        ("Mistral-7B-v0.1", 7.24, 7.0),
        ("Mixtral-8x7B", 46.7, 12.6),
        ("Gemma3-27B", 27.0, 25.6),
        ("gpt-oss-20b", 20.9, 3.0),
        ("gpt-oss-120b", 117, 4.55),
        ("DeepSeek-V3", 671, 35.7),
        ("Qwen3-Next-80B-A3B", 79.7, 3.25),
        ("LFM2-1.2B", 1.17, 1.036),
        ("Jamba-v0.1", 51.6, 11.6),
        ("Phi-3-mini", 3.82, 3.6),
    ],
)
def test_parameters_are_those_that_the_model_cards_name(name: str, billions: float, active: float) -> None:
    model = load_model(name)
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.02)


def test_weights_in_fewer_bits() -> None:
    for name, gib in {"DeepSeek-V3": 627, "gpt-oss-20b": 12.8, "Llama-3.1-8B": 14.96}.items():
        assert load_model(name).weights_bytes() == pytest.approx(gib * (1 << 30), rel=0.01)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("slots", "heads", "channels"), [(16, 8, 128), (32, 1, 64), (24, 3, 96), (1, 2, 256), (16, 8, 80)]
)
def test_records_are_those_of_the_kernels(slots: int, heads: int, channels: int) -> None:
    from tiercache.kernels.kv_formats import BlockFormat

    for dtype, name in (("fp8", "fp8_e4m3"), ("fp8", "fp8_e5m2"), ("int8", "int8"), ("int4", "int4")):
        assert record_bytes(dtype, slots, heads, channels) == BlockFormat(name, slots, heads, channels).record_bytes


def test_a_window_caps_a_sequence() -> None:
    model = load_model("Mistral-7B-v0.1")
    form = Form(model, "auto", 16, 1)
    assert form.sequence_gpu_bytes(4096) == 4096 * 128 * KIB
    assert form.sequence_gpu_bytes(32768) == form.sequence_gpu_bytes(5000) == (4096 + 16) * 128 * KIB
    mixed = Form(load_model("Gemma3-27B"), "auto", 16, 1)
    of_a_layer = 2 * 2 * 16 * 128
    assert mixed.sequence_gpu_bytes(65536) == of_a_layer * (10 * 65536 + 52 * 1040)


def test_shards() -> None:
    model = load_model("Llama-3.1-70B")
    assert Form(model, "auto", 16, 4).gpu_block_bytes * 4 == Form(model, "auto", 16, 1).gpu_block_bytes
    assert Form(model, "auto", 16, 16).gpu_block_bytes * 8 == Form(model, "auto", 16, 1).gpu_block_bytes  # 8 KV heads
    latent = load_model("DeepSeek-V3")
    assert Form(latent, "auto", 16, 8).gpu_block_bytes == Form(latent, "auto", 16, 1).gpu_block_bytes
    assert Form(latent, "auto", 16, 8).tier_block_bytes == Form(latent, "auto", 16, 1).tier_block_bytes


def test_work_of_a_prompt() -> None:
    model = load_model("Llama-3.1-8B")
    assert model.prefill_flops(1) == 2 * model.active_parameters + 32 * 4 * 4096
    assert model.prefill_flops(1000) == 1000 * 2 * model.active_parameters + 32 * 4 * 4096 * 1000 * 1001 / 2
    narrow = load_model("Mistral-7B-v0.1")
    step = narrow.prefill_flops(20001) - narrow.prefill_flops(20000)
    assert step == 2 * narrow.active_parameters + 32 * 4 * 4096 * 4096


# --- configurations ------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("more", "windows"),
    [
        ({}, [0, 0, 0, 0]),
        ({"sliding_window": 8}, [8, 8, 8, 8]),
        ({"sliding_window": 8, "use_sliding_window": False}, [0, 0, 0, 0]),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, [0, 0, 0, 8]),
        ({"sliding_window": 8, "sliding_window_pattern": 2}, [8, 0, 8, 0]),
        ({"sliding_window": 8, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, [0, 0, 0, 8]),
    ],
)
def test_which_layers_have_a_window(more: dict[str, Any], windows: list[int]) -> None:
    assert [layer.window for layer in read_config("small", {**SMALL, **more}).layers] == windows


def test_defaults_and_nested_configurations() -> None:
    model = read_config("small", {"text_config": SMALL, "torch_dtype": "float32", "tie_word_embeddings": True})
    assert (model.kv_heads, model.head_dim, model.dtype_bytes) == (4, 16, 4)
    assert model.embedding_parameters == 6400


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, ["num_attention_heads", "config.json of a decoder"]),
        ({**SMALL, "hidden_size": "big"}, ["hidden_size", "'big'", "whole number"]),
        ({**SMALL, "torch_dtype": "int3"}, ["int3", "bfloat16"]),
        ({**SMALL, "layer_types": ["full_attention"]}, ["layer_types", "4 layers"]),
        ({**SMALL, "layer_types": ["linear_attention", "full_attention"] * 2}, ["linear_attention", "not known here"]),
        ({**SMALL, "quantization_config": {"quant_method": "awq"}}, ["awq", "--weights"]),
        ([1], ["no config.json", "list"]),
    ],
)
def test_a_wrong_configuration_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: object, words: list[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    one_line(capsys, [str(tmp_path)], *words)


# --- the command ---------------------------------------------------------------------------------


def tree(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], *words: str) -> None:
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert [word for word in words if word not in err] == [], err


def test_what_the_tiers_hold(capsys: pytest.CaptureFixture[str]) -> None:
    found = tree(
        capsys,
        "Llama-3.1-8B",
        "--gpu",
        "80GiB",
        "--dram",
        "64GiB",
        "--nvme",
        "1TiB",
        "--tokens-per-s",
        "1000",
        "--length",
        "4096",
    )
    assert found["kv"]["tier_block_bytes"] == 2 << 20
    weights = found["model"]["weights_bytes"]
    pool_bytes = int((80 << 30) * 0.9) - weights - (2 << 30)
    blocks = pool_bytes // (2 << 20)
    assert (found["gpu"]["pool_bytes"], found["gpu"]["pool_tokens"]) == (pool_bytes, blocks * 16)
    assert [one["tokens"] for one in found["tiers"]] == [blocks * 16, 524288, 8388608]
    assert found["tiers"][1]["holds_s"] == 524.288
    [sequence] = found["sequences"]
    assert (sequence["bytes"], sequence["in_dram"], sequence["in_nvme"]) == (512 << 20, 128, 2048)
    assert sequence["in_gpu"] == pool_bytes // (512 << 20)


def test_requests_per_second(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("Qwen3-8B", "--length", "2048")
    by_requests = tree(capsys, *arguments, "--requests-per-s", "0.5")
    assert by_requests["tiers"] == tree(capsys, *arguments, "--tokens-per-s", "1024")["tiers"]


def test_load_or_compute(capsys: pytest.CaptureFixture[str]) -> None:
    [one] = tree(
        capsys,
        "Llama-3.1-8B",
        "--tflops",
        "100",
        "--mfu",
        "0.5",
        "--bus",
        "10GB",
        "--dram-bandwidth",
        "5GB/s",
        "--nvme-bandwidth",
        "1GB",
        "--length",
        "8192",
    )["loads"]
    assert one["compute_s"] == pytest.approx(load_model("Llama-3.1-8B").prefill_flops(8192) / 50e12)
    assert (one["bytes"], one["dram_s"], one["nvme_s"]) == (1 << 30, (1 << 30) / 5e9, (1 << 30) / 1e9)
    assert one["break_even_bytes_per_s"] * one["compute_s"] == pytest.approx(1 << 30)


def test_a_shared_store(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["Llama-3.1-8B", "--tflops", "100", "--length", "8192", "--shared", "2TiB", "--tokens-per-s", "1000"]
    arguments += ["--shared-bandwidth", "8Gbit/s", "--shared-round-trip", "250ms"]
    found = tree(capsys, *arguments)
    tier = found["tiers"][-1]
    assert (tier["tier"], tier["blocks"], tier["tokens"], tier["holds_s"]) == ("shared", 1 << 20, 1 << 24, 16777.216)
    assert found["sequences"][0]["in_shared"] == 2048
    [one] = found["loads"]
    assert one["shared_s"] == pytest.approx((1 << 30) / 1e9 + 2 * 0.25)
    assert (found["shared"]["bytes_per_s"], found["shared"]["round_trip_s"]) == (10**9, 0.25)
    pays = found["shared"]["pays_from_tokens"]
    lengths = ["--length", str(pays - 16), "--length", str(pays)]
    short, enough = tree(capsys, *arguments[:3], *arguments[5:], *lengths)["loads"]
    assert short["shared_s"] >= short["compute_s"]
    assert enough["shared_s"] < enough["compute_s"]
    nearer = tree(capsys, *arguments[:-1], "0.5ms")["shared"]["pays_from_tokens"]
    assert 0 < nearer < pays


def test_a_network_that_is_slower_than_computing_never_pays(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["Llama-3.1-8B", "--gpu", "H100", "--shared", "2TiB"]
    assert tree(capsys, *arguments, "--shared-bandwidth", "100MB")["shared"]["pays_from_tokens"] is None
    assert main(["plan", *arguments, "--shared-bandwidth", "100MB"]) == 0
    assert "no hit in the shared store pays" in capsys.readouterr().out
    assert main(["plan", *arguments, "--shared-bandwidth", "100Gbit"]) == 0
    out = capsys.readouterr().out
    for words in ("from shared", "1,048,576", "a hit in the shared store pays from"):
        assert words in out
    assert tree(capsys, "Llama-3.1-8B")["shared"] is None


def test_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "mistralai/mistral_7b_v0.1", "--kv-cache-dtype", "int8", "--nvme", "0"]) == 0
    out = capsys.readouterr().out
    for words in ("Mistral-7B-v0.1: 7.2B parameters", "68.5 KiB in int8", "look back 4,096 tokens", "from DRAM"):
        assert words in out
    assert "NVMe" not in out
    assert "shared" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Llama-3.1-7B"], ["did you mean Llama-3.1-70B", "config.json"]),
        (["zzz"], ["known are Llama-3.1-8B", "config.json"]),
        (["Qwen3-8B", "--gpu", "H10"], ["did you mean H100", "--gpu 80GiB"]),
        (["Qwen3-8B", "--gpu", "80 sheep"], ["--gpu", "16GiB"]),
        (["Qwen3-8B", "--dram", "much"], ["--dram", "16GiB"]),
        (["Llama-3.1-70B"], ["131.4 GiB", "--tensor-parallel-size 2"]),
        (["DeepSeek-V3", "--gpu", "L4"], ["--tensor-parallel-size 32"]),
        (["Llama-3.1-70B", "--tensor-parallel-size", "3"], ["64 attention heads", "divides"]),
        (["DeepSeek-V3", "--weights", "1GiB", "--kv-cache-dtype", "int4"], ["latent", "--kv-cache-dtype auto"]),
        (["Qwen3-8B", "--kv-cache-dtype", "int3"], ["int3", "auto, bf16, fp8, int8, int4"]),
        (["Qwen3-8B", "--mfu", "2"], ["--mfu 2", "0.5"]),
        (["Qwen3-8B", "--gpu-memory-utilization", "0"], ["--gpu-memory-utilization 0"]),
        (["Qwen3-8B", "--requests-per-s", "2"], ["one --length"]),
        (["Qwen3-8B", "--tokens-per-s", "1", "--requests-per-s", "2"], ["either"]),
        (["Qwen3-8B", "--tokens-per-s", "0"], ["more than 0"]),
        (["Qwen3-8B", "--length", "0"], ["--length"]),
        (["Qwen3-8B", "--bus", "0"], ["--bus 0", "more than 0"]),
        (["Qwen3-8B", "--shared", "20x"], ["--shared", "16GiB"]),
        (["Qwen3-8B", "--shared-bandwidth", "0Gbit/s"], ["--shared-bandwidth 0Gbit/s", "more than 0"]),
        (["Qwen3-8B", "--shared-round-trip", "soon"], ["--shared-round-trip", "250ms"]),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    one_line(capsys, arguments, *words)


@pytest.mark.parametrize("name", MODELS)
def test_every_known_model_can_be_planned(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert tree(capsys, name, "--gpu", "B200", "--tensor-parallel-size", "8")["gpu"]["pool_blocks"] > 1000


def test_gpus_have_figures_of_a_kind() -> None:
    for gpu in GPUS.values():
        assert 16 << 30 < gpu.memory_bytes < 1 << 40
        assert 1e14 < gpu.flops < 1e16
        assert 1e10 < gpu.bus_bytes_per_s < 1e11


def test_neither_torch_nor_numpy_is_needed() -> None:
    code = "import sys; from tiercache.cli.main import main; main(['plan', 'Qwen3-8B', '--json']);"
    code += "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
