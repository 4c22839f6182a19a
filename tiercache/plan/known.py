"""The models and GPUs that `tiercache plan` knows by name, from config.json files and data sheets.

Each model has only those fields of its config.json on huggingface.co that determine sizes and work.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NamedTuple

from tiercache.errors import ConfigError


def _config(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocabulary: int, **more: Any) -> Any:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "torch_dtype": "bfloat16",
        **more,
    }


def _gpt_oss(layers: int, experts: int) -> Any:
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    return _config(
        2880,
        layers,
        64,
        8,
        2880,
        201088,
        head_dim=64,
        num_local_experts=experts,
        num_experts_per_tok=4,
        sliding_window=128,
        layer_types=kinds,
        max_position_embeddings=131072,
        quantization_config={"quant_method": "mxfp4"},
    )


MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": _config(4096, 32, 32, 8, 14336, 128256, max_position_embeddings=131072),
    "Llama-3.1-70B": _config(8192, 80, 64, 8, 28672, 128256, max_position_embeddings=131072),
    "Qwen3-8B": _config(4096, 36, 32, 8, 12288, 151936, head_dim=128, max_position_embeddings=40960),
    "Qwen3-32B": _config(5120, 64, 64, 8, 25600, 151936, head_dim=128, max_position_embeddings=40960),
    "Qwen3-30B-A3B": _config(
        2048,
        48,
        32,
        4,
        6144,
        151936,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        max_position_embeddings=40960,
    ),
    "Mistral-7B-v0.1": _config(4096, 32, 32, 8, 14336, 32000, sliding_window=4096, max_position_embeddings=32768),
    "Mixtral-8x7B": _config(
        4096, 32, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=32768
    ),
    "Gemma3-27B": _config(
        5376,
        62,
        32,
        16,
        21504,
        262208,
        head_dim=128,
        sliding_window=1024,
        sliding_window_pattern=6,
        tie_word_embeddings=True,
        max_position_embeddings=131072,
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "DeepSeek-V3": _config(
        7168,
        61,
        128,
        128,
        18432,
        129280,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        max_position_embeddings=163840,
        quantization_config={"quant_method": "fp8"},
    ),
    "Qwen3-Next-80B-A3B": _config(
        2048,
        48,
        16,
        2,
        5120,
        151936,
        model_type="qwen3_next",
        head_dim=256,
        full_attention_interval=4,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        max_position_embeddings=262144,
    ),
    "LFM2-1.2B": _config(
        2048,
        16,
        32,
        8,
        12288,
        65536,
        model_type="lfm2",
        conv_L_cache=3,
        full_attn_idxs=[2, 5, 8, 10, 12, 14],
        max_position_embeddings=128000,
    ),
    "Jamba-v0.1": _config(
        4096,
        32,
        32,
        8,
        14336,
        65536,
        attn_layer_period=8,
        attn_layer_offset=4,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=16,
        num_experts_per_tok=2,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=256,
        max_position_embeddings=262144,
    ),
    "Phi-3-mini": _config(3072, 32, 32, 32, 8192, 32064, sliding_window=2047, max_position_embeddings=4096),
}


class Gpu(NamedTuple):
    """A GPU according to its data sheet: memory, dense 16-bit arithmetic, and the practical bandwidth of its bus."""

    memory_bytes: int
    flops: float
    bus_bytes_per_s: float


# 80% of the bus's 16 lanes each way: PCIe 4 has 31.5 GB/s, PCIe 5 has 63.
_PCIE4, _PCIE5 = 25e9, 50e9
GPUS: dict[str, Gpu] = {
    "L4": Gpu(24 << 30, 121e12, _PCIE4),
    "RTX4090": Gpu(24 << 30, 165e12, _PCIE4),
    "L40S": Gpu(48 << 30, 362e12, _PCIE4),
    "A100-40G": Gpu(40 << 30, 312e12, _PCIE4),
    "A100": Gpu(80 << 30, 312e12, _PCIE4),
    "H100": Gpu(80 << 30, 989e12, _PCIE5),
    "H200": Gpu(141 * 10**9, 989e12, _PCIE5),
    "B200": Gpu(180 * 10**9, 2250e12, _PCIE5),
}


def find(name: str, known: Iterable[str]) -> str | None:
    """The name as listed here; ignores case, `-`, `_`, the owner before a slash and endings like -Instruct."""
    wanted = _plain(name)
    plain = {_plain(one): one for one in known}
    if wanted in plain:
        return plain[wanted]
    for ending in ("instruct", "it", "chat", "base", "hf"):
        if wanted.endswith(ending) and wanted.removesuffix(ending) in plain:
            return plain[wanted.removesuffix(ending)]
    return None


def _plain(name: str) -> str:
    return "".join(letter for letter in name.rpartition("/")[2].lower().removeprefix("meta-") if letter.isalnum())


def unknown(what: str, name: str, known: Iterable[str], remedy: str) -> ConfigError:
    """The error message for an unknown name, with the nearest known one."""
    plain = {_plain(one): one for one in known}
    near = get_close_matches(_plain(name), plain, n=1, cutoff=0.5)
    hint = f"did you mean {plain[near[0]]}? Known are" if near else "known are"
    return ConfigError(f"no {what} {name!r} here: {hint} {', '.join(plain.values())}; {remedy}")
