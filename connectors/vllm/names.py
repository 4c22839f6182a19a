"""Names of a vLLM engine's blocks: our keys, vLLM's own hashes, and cards that tell the daemon which are which.

A root key stands for weights, config, adapters and tenant in one name.

vLLM's own block hashes name tokens, images, salt and an adapter's name, and nothing of the model; a key here is such a
hash under a root that identifies the rest by content. The files are read once, in the background. Lookups wait for that
a little after the start, so that the first requests of an engine with small or pinned weights can hit; then everything
is a miss until it is done.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiercache.connector.connector import Connector
from tiercache.connectors.weights.files import content_of, states_of
from tiercache.errors import ModelRefused, TierCacheError
from tiercache.ground import forks
from tiercache.protocol.keys import content_id, salted_root
from tiercache.protocol.messages import KEY_BYTES, ModelCard
from tiercache.protocol.namespaces import NamespaceSpec

HASHES = ("sha256", "sha256_cbor")
OPTIONS = (
    "quantization_config",
    "model_impl",
    "model_class_overrides",
    "code_revision",
    "disable_sliding_window",
    "generation_config",
    "override_generation_config",
)
"""Fields of vLLM's model_config that affect the model besides weights and config."""
MEDIA_OPTIONS = (
    *("mm_processor_kwargs", "mm_device_do_normalize", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path"),
    *("video_pruning_rate", "video_pruning_method"),
)
"""Fields of its multimodal_config that affect how images are computed. The KV that results has no other name."""
LOADING = ("load_format", "model_loader_extra_config")
"""Fields of its load configs that say which files of a folder are loaded, and how."""
OF_FILES = (
    *("auto", "hf", "pt", "safetensors", "instanttensor", "fastsafetensors", "npcache", "dummy", "sharded_state"),
    *("gguf", "bitsandbytes", "mistral", "runai_streamer", "runai_streamer_sharded"),
)
"""Values of load_format that load what is in the model's folder; others, also of plugins, may bring other weights."""
ATTENTION = ("use_prefill_query_quantization", "disable_flashinfer_q_quantization")
"""Fields of its attention_config that make it compute in other types."""
KERNELS = ("moe_backend", "linear_backend", "linear_backend_per_quant")
"""Fields of its kernel_config that choose kernels, of which some quantise activations and others do not."""
ADAPTING = ("lora_dtype", "target_modules", "enable_tower_connector_lora", "enable_moe_shared_loras")
"""Fields of its lora_config that say how an adapter's files are used, and in which modules of the model."""
ENVIRONMENT = (
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_USE_F16_ACCUM",
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_MLA_DISABLE",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_ROCM_USE_AITER_FP4BMM",
    "VLLM_ROCM_USE_AITER_FP8BMM",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
)
"""Variables by which vLLM computes in other types or takes other experts, whatever the model says."""

logger = logging.getLogger("tiercache.connectors.vllm")


def keys_of(root: bytes, block_hashes: list[bytes], per_block: int, first: int, end: int) -> bytes:
    """The keys of blocks `first ..< end`, each of `per_block` hashes of vLLM's; these identify the whole prefix."""
    blake2b = hashlib.blake2b
    ends = range((first + 1) * per_block - 1, end * per_block, per_block)
    return b"".join(blake2b(block_hashes[end], digest_size=KEY_BYTES, key=root).digest() for end in ends)


def check_hashes(vllm_config: Any) -> None:
    """Raise ModelRefused for settings under which equal names would not mean equal blocks."""
    cache = vllm_config.cache_config
    if cache.prefix_caching_hash_algo not in HASHES:
        text = f"prefix_caching_hash_algo is {cache.prefix_caching_hash_algo}, whose hashes differ between processes"
        raise ModelRefused(f"{text}: set it to sha256")
    if not cache.enable_prefix_caching:
        # vLLM turns it off itself if a backend cannot compute on top of existing KV.
        raise ModelRefused("prefix caching is off in vLLM, or not possible with this model here: turn it on")
    if getattr(cache, "calculate_kv_scales", False):
        raise ModelRefused("calculate_kv_scales makes the scales of KV differ between processes: leave it off")
    if getattr(getattr(vllm_config, "attention_config", None), "hisparse_config", None) is not None:
        raise ModelRefused("HiSparse keeps blocks in a pool of its own, which is not served: leave one of the two out")


def check_origin(loads: Iterable[Any]) -> None:
    """Raise ModelRefused for weights that may not be those of the model's files. A load config may be None."""
    for how in (getattr(load, "load_format", "auto") for load in loads):
        if how not in OF_FILES:
            text = f"with load_format {how} the weights may be others than in the model's files"
            raise ModelRefused(f"{text}: set model_id")


class Names:
    """The roots of one engine's chains.

    Args:
        wait_s: how long after now `root` may wait for the model's name.
        more: further parts of the model's name.
    """

    def __init__(self, vllm_config: Any, model_id: str, salt: str, wait_s: float, **more: Any) -> None:
        self._config = vllm_config
        self._more = more
        self._model_id = model_id
        self._salt = salt
        self._epoch = ""
        self._engine = os.urandom(KEY_BYTES).hex()
        self._model = ""
        self._named = threading.Event()
        forks.watch(self, "_named")
        self._deadline_s = time.monotonic() + wait_s
        self._adapters: dict[int, tuple[list[Any], str]] = {}  # by vLLM's id: files and content when first used
        self.on_use: Callable[[bytes, str, str], None] = lambda content, adapter, adapter_path: None
        """Called for every request with what computes its blocks."""

    def read_later(self, who: str) -> None:
        """Name the model in the background; if that fails, `who` is served without the cache, which is logged."""
        threading.Thread(target=self._read, args=(who,), name="tiercache-names", daemon=True).start()

    def _read(self, who: str) -> None:
        try:
            self.read_model()
            self.root()  # so that affinity queries know it before the first request
        except (TierCacheError, OSError) as error:
            logger.error("%s is served without the cache: %s", who, error)
        except Exception:
            logger.exception("%s is served without the cache: its model cannot be named, set model_id", who)

    def read_model(self) -> None:
        """Name the model. Reads every byte of its weights, unless a hub's commit or `model_id` pins them.

        Raises ModelRefused, OSError.
        """
        model, load = self._config.model_config, self._config.load_config
        speculative = self._config.speculative_config
        draft = getattr(speculative, "draft_model_config", None)
        loads = [load, getattr(speculative, "draft_load_config", None)]
        if not self._model_id:
            check_origin(loads)
        places = [place.model for place in (model, draft) if place]
        states = [*map(states_of, places)]
        code = bool(getattr(model, "trust_remote_code", False))
        described = {
            "weights": self._model_id or content_of(model.model, model.revision, load.load_format, code),
            "draft": content_of(draft.model, draft.revision, load.load_format, code) if draft else "",
            "config": [_config_of(each) for each in (model, draft) if each],
            "types": [str(model.dtype), str(model.quantization), str(self._config.cache_config.cache_dtype)],
            "loading": [_fields(each, LOADING) for each in loads],
            "options": _fields(model, OPTIONS),
            "media": _fields(getattr(model, "multimodal_config", None), MEDIA_OPTIONS),
            "attention": _fields(getattr(self._config, "attention_config", None), ATTENTION),
            "kernels": _fields(getattr(self._config, "kernel_config", None), KERNELS),
            "environment": [os.environ.get(name) for name in ENVIRONMENT],
            **self._more,
        }
        if not self._model_id and states != [*map(states_of, places)]:
            raise ModelRefused("the files of the weights have changed while they were read: start vLLM again")
        self._model = json.dumps(described, sort_keys=True, default=str)
        self._named.set()

    def root(self, lora_request: Any = None, own: bool = False) -> bytes:
        """The root of a request's chain; empty while it has no name. Reads an adapter that it has not seen.

        With `own` no other engine has this root: what the request says of its content has a meaning in this one only.
        Blocks until there is a name, for at most `wait_s` after the start. Raises ModelRefused, OSError.
        """
        if not self._named.wait(max(0.0, self._deadline_s - time.monotonic())):
            return b""
        name, path = ("", "") if lora_request is None else (lora_request.lora_name, lora_request.lora_path)
        adapter = self._adapter(lora_request) if path else ""
        if path and not adapter:
            return b""
        extra = [("epoch", self._epoch), ("adapter", adapter)]
        if own:
            return salted_root(content_id(self._model, extra=[*extra, ("engine", self._engine)]), self._salt)
        content = content_id(self._model, extra=extra)
        self.on_use(content, name, path)
        return salted_root(content, self._salt)

    def _adapter(self, lora_request: Any) -> str:
        """The content of an adapter and how it is used; empty if its files have changed since vLLM loaded it."""
        adapter_id, path = lora_request.lora_int_id, lora_request.lora_path
        state = [path, *states_of(path)]
        if adapter_id not in self._adapters or (lora_request.load_inplace and self._adapters[adapter_id][0] != state):
            content = content_of(path, None, "")
            if state != [path, *states_of(path)]:
                content = ""  # vLLM may have either
            self._adapters[adapter_id] = state, content
        loaded, content = self._adapters[adapter_id]
        if not content or loaded != state:
            return ""
        used = _fields(getattr(self._config, "lora_config", None), ADAPTING)
        return f"{content} {used} {getattr(lora_request, 'is_3d_lora_weight', False)}"

    def new_epoch(self) -> None:
        """Use names that no other engine has from here on: the weights may have changed."""
        self._epoch = os.urandom(KEY_BYTES).hex()


def lengths_of(vllm_config: Any) -> list[int]:
    """Stands for the modules that models build by the length of requests, if those cannot be inspected.

    The second is the length before vLLM fitted it into memory, by which the modules may have been built.
    """
    model = vllm_config.model_config
    return [model.max_model_len, getattr(model, "original_max_model_len", None) or 0]


def _fields(config: Any, names: Iterable[str]) -> list[str]:
    """The values of these fields. Fields and configs that this version of vLLM lacks are None."""
    return [str(getattr(config, name, None)) for name in names]


def _config_of(model: Any) -> dict[str, Any]:
    """The config of a model, without its origin."""
    return {**model.hf_config.to_dict(), "_name_or_path": "", "transformers_version": ""}


# --- vLLM's own block hashes, for affinity queries ---------------------------------------------------
#
#     hash_0 = the seed's hash;  hash_i = sha256(encode((hash_(i-1), tokens of block i, extras)))
#
# `encode` is Python's pickle (protocol 5, which every Python writes alike for these types) or canonical CBOR
# (RFC 8949). The seed is a constant, or PYTHONHASHSEED where that is set. Only token ids, an adapter and a `cache_salt`
# are known here: prompts with images have other hashes.

_SEED = "vllm-none-hash"
_HEADS = ((0xFF, 0x18, 1), (0xFFFF, 0x19, 2), (0xFFFFFFFF, 0x1A, 4), (0xFFFFFFFFFFFFFFFF, 0x1B, 8))


def _cbor_head(major: int, value: int) -> bytes:
    """Major type and argument, in the shortest form."""
    if value < 24:
        return bytes([major << 5 | value])
    _, code, size = next(head for head in _HEADS if value <= head[0])
    return bytes([major << 5 | code]) + value.to_bytes(size, "big")


def _cbor(value: Any) -> bytes:
    """Encode the values that a block's hash is made of."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _cbor_head(0, value)
    if isinstance(value, bytes):
        return _cbor_head(2, len(value)) + value
    if isinstance(value, str):
        return _cbor_head(3, len(value.encode())) + value.encode()
    return _cbor_head(4, len(value)) + b"".join(map(_cbor, value))


def _pickle(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


ENCODINGS: Mapping[str, Callable[[Any], bytes]] = {"sha256": _pickle, "sha256_cbor": _cbor}
"""vLLM's `prefix_caching_hash_algo` -> the encoding that is hashed."""


def hash_seed(algorithm: str, environ: Mapping[str, str] = os.environ) -> bytes:
    """What an engine started in this environment hashes before its first block."""
    return hashlib.sha256(ENCODINGS[algorithm](environ.get("PYTHONHASHSEED", _SEED))).digest()


def block_hashes(
    algorithm: str,
    seed: bytes,
    tokens: Sequence[int],
    size: int,
    adapter: tuple[str, str] | None = None,
    cache_salt: str = "",
) -> list[bytes]:
    """The hashes of all full blocks of `size` tokens.

    `adapter` is the name and path of a LoRA adapter, `cache_salt` that of the request.
    """
    encode, sha256 = ENCODINGS[algorithm], hashlib.sha256
    always = () if adapter is None else (("lora", *adapter),)
    last, hashes = seed, []
    for start in range(0, len(tokens) - size + 1, size):
        extras = (*always, ("cache_salt", cache_salt)) if cache_salt and not start else always
        last = sha256(encode((last, tuple(tokens[start : start + size]), extras or None))).digest()
        hashes.append(last)
    return hashes


# --- model cards -------------------------------------------------------------------------------------

HASHING = "vllm/"
"""`ModelCard.hashing` is this and vLLM's name of the hash."""
MAX_CARDS = 64
"""For the most recently used adapters."""


class Cards:
    """The cards of one engine. Thread-safe.

    Args:
        connector: announces them.
        specs: the forms of all ranks' and groups' blocks.
        hash_size: tokens in a block hash of vLLM's.
    """

    def __init__(self, vllm_config: Any, connector: Connector, specs: Iterable[NamespaceSpec], hash_size: int) -> None:
        model, algorithm = vllm_config.model_config, vllm_config.cache_config.prefix_caching_hash_algo
        served = model.served_model_name
        names = [*([served] if isinstance(served, str) else served or []), model.model, Path(model.model).name]
        self._names = list(dict.fromkeys(names))
        self._connector = connector
        self._namespaces = sorted({spec.fingerprint() for spec in specs})
        self._hashing, self._seed, self._hash_size = HASHING + algorithm, hash_seed(algorithm), hash_size
        self._cards: dict[tuple[str, str], ModelCard] = {}
        self._lock = threading.Lock()
        forks.watch(self, "_lock")

    def add(self, content: bytes, adapter: str, adapter_path: str) -> None:
        """Blocks of `content`, perhaps with an adapter, are being used. Cheap if already announced."""
        known = self._cards.get((adapter, adapter_path))
        if known is not None and known.content == content:
            return
        block_size = self._connector.namespace.block_size
        with self._lock:
            self._cards.pop((adapter, adapter_path), None)
            while len(self._cards) >= MAX_CARDS:
                del self._cards[next(iter(self._cards))]
            self._cards[adapter, adapter_path] = ModelCard(
                self._names,
                content,
                self._namespaces,
                block_size,
                self._hashing,
                self._hash_size,
                self._seed,
                adapter,
                adapter_path,
            )
            self._connector.announce(list(self._cards.values()))
