"""What pages are called: a root that names all that computes them, and SGLang's hash of the page.

SGLang's hashes are a chain of SHA-256 over the tokens, seeded with the adapter and the request's salt. They say nothing
of the model, so a name is made of such a hash and a root. Reading the weights takes a while, so it happens in the
background; until then there are no names, and all is a miss.

    start ──► read ──► open ── an update of weights begins ──► closed ── SGLang empties its tree ──► open, in an epoch

An update may be a session of several steps, with a flush after each: it stays closed until the session has ended.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sglang.srt.configs.model_config import ModelConfig
from tiercache.connectors.weights.files import content_of, states_of
from tiercache.errors import ModelRefused, TierCacheError
from tiercache.ground import forks
from tiercache.protocol.keys import content_id, salted_root
from tiercache.protocol.messages import KEY_BYTES

from .settings import HiCacheSettings

HASH_BYTES = 32
OPTIONS = (
    "model_impl",
    "model_loader_extra_config",
    "json_model_override_args",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "speculative_algorithm",
    "speculative_draft_kv_cache_dtype",
    "speculative_draft_model_quantization",
    "speculative_draft_load_format",
    "rl_quant_profile",
    "modelopt_quant",
    "torchao_config",
    "context_length",
    "device",
    "enable_tf32_matmul",
    "enable_w4a4_mxfp4_megamoe",
    "flashinfer_mxfp4_moe_precision",
    "enable_deepseek_v4_fp4_indexer",
    "mamba_ssm_dtype",
    "enable_mamba_cache_stochastic_rounding",
    "enable_int8_mamba_checkpoint",
    "mm_process_config",
    "image_processor_backend",
    "enable_precise_embedding_interpolation",
    "dllm_algorithm",
    "dllm_algorithm_config",
    "forward_hooks",
    "rl_on_policy_target",
    "enable_hisparse",
    "hisparse_config",
    "qsa_indexer_dtype",
    "prefill_kv_cache_dequant_dtype",
    "deepep_dispatcher_output_dtype",
    "enable_quant_communications",
    "enable_encoder_swa_bounded_replay",
    "enable_decoder_swa_bounded_replay",
)
"""SGLang's arguments that affect KV besides weights and config."""
OF_FILES = (
    *("auto", "pt", "safetensors", "instanttensor", "fastsafetensors", "npcache", "dummy", "sharded_state", "gguf"),
    *("bitsandbytes", "mistral", "layered"),
)
"""Values of load_format that load what is in the model's folder; the others bring weights from elsewhere."""
ELSEWHERE = ("custom_weight_loader", "uno_lora_path", "kt_weight_path", "modelopt_checkpoint_restore_path")
"""Arguments that do, too."""

logger = logging.getLogger("tiercache.connectors.sglang")


class PageNames:
    """The names of one rank's pages. Thread-safe.

    Args:
        arguments: SGLang's ServerArgs.
        engine: random digits that all ranks of this engine share, and no other engine has.
        known: whether these weights are those that SGLang was started with.
    """

    def __init__(self, arguments: Any, settings: HiCacheSettings, engine: str, known: bool = True) -> None:
        self._arguments = arguments
        self._settings = settings
        self._engine = engine
        self._epoch = 0 if known else 1
        self._model = ""
        self._root = b""
        self._closed = False
        self._stale = not known  # the next flush begins an epoch
        self._sessions: set[int] = set()
        self._lock = threading.Lock()
        self._read = threading.Event()
        forks.watch(self, "_lock", "_read")
        self._deadline_s = time.monotonic() + settings.request_timeout_s
        threading.Thread(target=self._read_later, name="tiercache-names", daemon=True).start()

    # --- the root --------------------------------------------------------------------------------

    def root(self) -> bytes:
        """What the keys begin from; empty while there are no names. Just after the start it waits for the model's."""
        self._read.wait(max(0.0, self._deadline_s - time.monotonic()))
        return self._root

    def wait(self, timeout_s: float) -> bool:
        """Wait until the weights have been read, or cannot be; returns whether there are names."""
        self._read.wait(timeout_s)
        return bool(self._root)

    def weights_change(self) -> None:
        """Nothing has a name from here on until SGLang has emptied its tree, whose pages are of both weights."""
        with self._lock:
            if not self._closed:
                logger.info("the weights change: nothing is found or stored until SGLang flushes its cache after that")
            self._closed, self._root = True, b""

    def session_begins(self, model: int) -> None:
        """As `weights_change`, until the session ends too: flushes in between are of weights that are not final."""
        with self._lock:
            self._sessions.add(model)
        self.weights_change()

    def session_ends(self, model: int) -> None:
        """The weights of a model are final. If SGLang has emptied its tree since they came, there are names again.

        It may have computed pages in the meantime. These are of the epoch that the next flush ends.
        """
        with self._lock:
            self._sessions.discard(model)
            self._stale = True
            self._begin()

    def emptied(self) -> None:
        """SGLang has emptied its tree. If weights have changed before, an epoch begins: new names, of this engine."""
        with self._lock:
            if self._closed or self._stale:
                self._closed = self._stale = False
                self._epoch += 1
                logger.info("the weights have changed: SGLang finds only pages that it computes from here on")
            self._begin()

    def _begin(self) -> None:
        if self._model and not self._closed and not self._sessions:
            own = [("engine", self._engine), ("epoch", str(self._epoch))] if self._epoch else []
            self._root = salted_root(content_id(self._model, extra=own), self._settings.salt)

    # --- the model -------------------------------------------------------------------------------

    def _read_later(self) -> None:
        try:
            model = self._read_model()
        except (TierCacheError, OSError, ValueError) as error:
            logger.error("SGLang is served without the cache: %s", error)
        except Exception:  # of SGLang's own, which reads the config
            logger.exception("SGLang is served without the cache: what it computes cannot be named")
        else:
            with self._lock:
                self._model = model
                self._begin()
        self._read.set()

    def _read_model(self) -> str:
        """All that computes a page, as text. Reads every byte of the weights, unless a hub's commit or `model_id` pins
        them. Raises ModelRefused, OSError, ValueError."""
        arguments = self._arguments
        adapters = [(one.lora_name, one.lora_path) for one in arguments.lora_paths or ()]
        draft = arguments.speculative_draft_model_path
        paths = [arguments.model_path, *([draft] if draft else []), *(path for _, path in adapters)]
        states = [*map(states_of, paths)]
        config = ModelConfig.from_server_args(arguments)
        check_rope(config)
        code, given = bool(arguments.trust_remote_code), self._settings.model_id
        if not given:
            check_origin(arguments)
        scales = arguments.quantization_param_path
        described = {
            "weights": given or content_of(arguments.model_path, arguments.revision, arguments.load_format, code),
            "draft": content_of(draft, arguments.speculative_draft_model_revision, "auto", code) if draft else "",
            "adapters": [(name, path, content_of(path, None, "auto")) for name, path in adapters],
            "scales": content_of(scales, None, "auto") if scales else "",
            "config": {**config.hf_config.to_dict(), "_name_or_path": "", "transformers_version": ""},
            "options": [str(getattr(arguments, name, None)) for name in OPTIONS],
            "platform": [str(torch.version.cuda is not None), str(torch.version.hip is not None)],
            # SGLang puts 30 bits of a hash in the place of an image: enough for one engine, not for all forever.
            "engine": self._engine if config.is_multimodal and self._settings.media_ids == "engine" else "",
        }
        if states != [*map(states_of, paths)]:
            raise ModelRefused("the files of the weights have changed while they were read: start SGLang again")
        return json.dumps(described, sort_keys=True, default=str)

    # --- keys ------------------------------------------------------------------------------------

    def keys(self, root: bytes, hashes: Sequence[str]) -> bytes:
        """The keys of pages by SGLang's hashes of these. Raises ValueError for what is not such a hash.

        A hash names a prefix for all models; with the root it does so for one. Where the root is not secret the hash is
        cut and combined with it: 1024 keys take 50 us. With a salt only a keyed hash hides it; that takes 700 us.
        """
        packed = bytes.fromhex("".join(hashes))
        if len(packed) != HASH_BYTES * len(hashes):
            raise ValueError(f"SGLang's hashes of pages have {HASH_BYTES} bytes each")
        if self._settings.salt:
            keyed, ends = hashlib.blake2b, range(0, len(packed), HASH_BYTES)
            return b"".join(
                keyed(packed[at : at + HASH_BYTES], digest_size=KEY_BYTES, key=root).digest() for at in ends
            )
        words = np.frombuffer(packed, np.uint64).reshape(len(hashes), -1)
        cut = words[:, : KEY_BYTES // words.itemsize]
        return (cut ^ np.frombuffer(root, np.uint64)).tobytes()


def check_origin(arguments: Any) -> None:
    """Raise ModelRefused for weights that are not those of the model's files."""
    others = [name for name in ELSEWHERE if getattr(arguments, name, None)]
    for name in ("load_format", "speculative_draft_load_format"):
        if (how := getattr(arguments, name, None)) is not None and how not in OF_FILES:
            others.append(f"{name} {how}")
    if getattr(arguments, "weight_cache_mode", "off") != "off":
        others.append("weight_cache_mode")
    if others:
        raise ModelRefused(f"with {' and '.join(others)} the weights may be others than in its files: set model_id")


def check_rope(config: Any) -> None:
    """Raise ModelRefused for a model whose K depends on the length of other requests of a batch."""
    text = config.hf_text_config
    rope = getattr(text, "rope_scaling", None) or getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type", rope.get("type")) not in ("longrope", "su"):
        return
    name = "original_max_position_embeddings"
    limit = int(rope.get(name) or getattr(text, name, None) or text.max_position_embeddings)
    if config.context_len > limit:
        raise ModelRefused(
            "with its longrope SGLang computes the K of short requests by the longest one beside them: "
            f"set --context-length to {limit} or less"
        )
