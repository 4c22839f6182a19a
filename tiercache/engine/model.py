"""A Hugging Face decoder folder: reads its configuration, loads its weights, and runs it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tiercache.engine import attention
from tiercache.engine.attention import GroupedPass
from tiercache.engine.kv_pool import ALIASES, BatchSegment, KVLayout, KVPool, LayerGroups, group_layers
from tiercache.engine.settings import EngineSettings
from tiercache.engine.torch_attention import longest_sequence
from tiercache.errors import ConfigError, ModelRefused

if TYPE_CHECKING:
    from tiercache.engine.decode_graphs import DecodeGraphs

# --- linear layers in oneDNN's layout, on CPUs -------------------------------------------------------
#
# torch gives float32 products to MKL, which takes twice as long on processors other than Intel's, and packs the weights
# again for every few rows of a decode step. With weights packed once, by oneDNN, a product of 8 rows takes 0.4 of the
# time, one of 512 rows half (AMD EPYC, one thread). bfloat16 goes to oneDNN anyway.


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """True if `pack_linears` applies to a model of this dtype on this device."""
    if dtype is not torch.float32 or device.type != "cpu":
        return False
    return hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def pack_linears(module: Any) -> None:
    """Make all plain linear layers below `module` compute with packed copies of their weights.

    The weights themselves stay for other readers; if they are mapped from the model's file they take no
    memory of their own. A later change to them has no effect.
    """
    for layer in _plain_linears(module):
        vars(layer)["forward"] = _Packed(layer)


def own_weights(module: Any, *, packed: bool) -> None:
    """Copy the weights below `module` into memory of their own: transformers maps them from the model's files.

    Through such a map a write to a file changes what the engine computes, under the name of the weights before. With
    `packed`, weights that only `pack_linears` will read stay mapped. Takes as long as reading the files.
    """
    skipped = {id(layer.weight) for layer in _plain_linears(module)} if packed else set()
    for part in module.modules():
        if type(part) is not torch.nn.Linear:  # such as embeddings with the same weight
            skipped -= {id(weight) for weight in part._parameters.values()}
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in skipped:
            tensor.data = tensor.data.clone()


def _plain_linears(module: Any) -> list[torch.nn.Linear]:
    return [layer for layer in module.modules() if type(layer) is torch.nn.Linear]


class _Packed:
    """Replaces the `forward` of a linear layer."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), None)
        self._bias = None if layer.bias is None else layer.bias.detach()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return out


# --- the model ---------------------------------------------------------------------------------------

_SERVED_LAYERS = {"full_attention", "sliding_attention"}
# These compute a token's angles from the present length of its sequence, so that its K has no
# fixed value. Below the trained length they are constant.
_GROWING_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The parts of a model's config on which the KV pool and the limits depend."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    vocabulary: int
    max_context: int
    windows: tuple[int, ...]
    eos_token_ids: frozenset[int]

    def groups(self, settings: EngineSettings) -> LayerGroups:
        """The groups of layers that share blocks, and what sequences must keep of each."""
        return group_layers(self.windows, self.max_context, settings)

    def kv_layout(self, block_size: int, name: str = "auto", layers: int = 0) -> KVLayout:
        """The layout of blocks of that many layers (0: all), by a name as in `kv_cache_dtype`. Raises ConfigError."""
        name = ALIASES.get(name, name)
        try:
            return KVLayout(layers or self.layers, block_size, self.kv_heads, self.head_dim, self.dtype, name)
        except ValueError as error:
            raise ConfigError(f"this model's KV cannot be kept as {name}: {error}") from error


def weight_files(model_dir: str | Path) -> list[Path]:
    """The safetensors files of a model folder. Raises ModelRefused if it holds no such model."""
    folder = Path(model_dir)
    if not folder.is_dir():
        raise ModelRefused(f"{folder} is not a folder: give a downloaded Hugging Face model folder")
    if not (folder / "config.json").is_file():
        raise ModelRefused(f"{folder} has no config.json: give a Hugging Face model folder")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelRefused(f"{folder} has no *.safetensors: save the model with safe_serialization=True")
    return files


def read_shape(model_dir: str | Path, settings: EngineSettings) -> ModelShape:
    """Read config.json. Raises ModelRefused for a model that is not a decoder with plain attention."""
    weight_files(model_dir)
    try:
        full_config = AutoConfig.from_pretrained(str(model_dir), local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ModelRefused(f"transformers cannot read {model_dir}: {_first_line(error)}") from error
    config = full_config.get_text_config(decoder=True)
    if getattr(full_config, "is_encoder_decoder", False):
        raise ModelRefused(f"{full_config.model_type} is an encoder-decoder model: give a decoder")
    layer_types = getattr(config, "layer_types", None) or []
    strange = sorted(set(layer_types) - _SERVED_LAYERS)
    if strange:
        raise ModelRefused(
            f"{config.model_type} has {', '.join(strange)} layers: only full and sliding attention are served"
        )
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    return ModelShape(
        layers=layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=_dtype(settings.dtype, getattr(config, "dtype", None)),
        vocabulary=config.vocab_size,
        max_context=_max_context(config, settings),
        windows=_windows(config, layer_types, layers),
        eos_token_ids=_eos_token_ids(model_dir, full_config),
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _dtype(wanted: str, stored: Any) -> torch.dtype:
    name = str(stored or "float32").removeprefix("torch.") if wanted == "auto" else wanted
    dtype = getattr(torch, name, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelRefused(f"the model's dtype is {name}: set dtype to float32, bfloat16 or float16")
    assert isinstance(dtype, torch.dtype)
    return dtype


def _windows(config: Any, layer_types: Sequence[str], layers: int) -> tuple[int, ...]:
    """The sliding window of each layer according to the config, 0 for none."""
    window = int(getattr(config, "sliding_window", None) or 0)
    if layer_types:
        return tuple(window if kind == "sliding_attention" else 0 for kind in layer_types)
    if getattr(config, "use_sliding_window", True) is False:
        window = 0
    return (window,) * layers


def _max_context(config: Any, settings: EngineSettings) -> int:
    allowed = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
    longest = longest_sequence(allowed)
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if entry.get("rope_type") in _GROWING_ROPE:
            name = "original_max_position_embeddings"
            allowed = longest = min(allowed, int(entry.get(name) or getattr(config, name, None) or allowed))
    span = settings.attention_window + settings.sink_tokens
    if span > allowed:
        raise ConfigError(
            f"attention_window is {settings.attention_window}: beside {settings.sink_tokens} tokens of sinks it can be "
            f"{allowed - settings.sink_tokens} at most, for the model sees {allowed}"
        )
    if span:
        allowed = longest
    if settings.max_model_len > allowed:
        raise ConfigError(f"max_model_len is {settings.max_model_len}: the model is served up to {allowed}")
    return settings.max_model_len or allowed


def _eos_token_ids(model_dir: str | Path, config: Any) -> frozenset[int]:
    eos: Any = None
    if (Path(model_dir) / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(str(model_dir), local_files_only=True).eos_token_id
    eos = config.eos_token_id if eos is None and hasattr(config, "eos_token_id") else eos
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def choose_device(wanted: str) -> torch.device:
    """`auto`, `cpu` or `cuda` as a device. Raises ConfigError if CUDA is asked for and missing."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch finds no CUDA device: set device to 'cpu' or 'auto'")
    cuda = wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if cuda else "cpu")


class HostedModel:
    """The weights, run over a paged KV pool.

    Raises ModelRefused when transformers cannot load the folder. Blocks for as long as reading
    the weights takes.
    """

    def __init__(self, model_dir: str | Path, shape: ModelShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        try:
            module: Any = AutoModelForCausalLM.from_pretrained(
                str(model_dir),
                dtype=shape.dtype,
                attn_implementation=attention.NAME,
                local_files_only=True,
                use_safetensors=True,
            )
        except Exception as error:
            # Damaged files, sizes that do not fit, missing code: each raises its own type.
            raise ModelRefused(f"transformers cannot host {model_dir}: {_first_line(error)}") from error
        self.module = module.to(device).eval()
        packed = can_pack(shape.dtype, device)
        if device.type == "cpu":  # elsewhere they have been copied
            own_weights(self.module, packed=packed)
        if packed:
            pack_linears(self.module)
        self._keeps_logits = "logits_to_keep" in inspect.signature(module.forward).parameters
        self._graphs: DecodeGraphs | None = None

    def new_pool(
        self,
        num_blocks: int,
        block_size: int,
        kv_cache_dtype: str = "auto",
        max_sequences: int = 0,
        groups: LayerGroups | None = None,
    ) -> KVPool:
        """Zeroed KV memory, with tails for `max_sequences` if blocks are quantised. See `KVPool`.

        Blocks have all layers, or the layers of one of `groups`.
        """
        layers, count, places = (groups.block_layers, len(groups.groups), groups.places) if groups else (0, 1, ())
        layout = self.shape.kv_layout(block_size, kv_cache_dtype, layers)
        return KVPool(layout, num_blocks, max_sequences * count, self.device, places)

    def forward(self, batch: attention.Batch, tokens: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        """Run `tokens` of `batch`; returns the logits after the tokens at `rows`, `[row, vocabulary]`.

        Writes K and V of all tokens into the pool. On CUDA it returns before the device is done.
        """
        with torch.inference_mode():
            if self._graphs is not None and len(rows) == len(tokens):
                logits = self._graphs.forward(batch, tokens)
                if logits is not None:
                    return logits
            inputs = torch.tensor([tokens], device=self.device)
            # A forward pass computes at least one row: the last row of a chunk that ends no prompt.
            return self._run(batch, inputs, torch.tensor(rows or [len(tokens) - 1], device=self.device))

    def _run(self, batch: attention.Batch, inputs: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        with attention.attend(batch):
            extra = {"logits_to_keep": kept} if self._keeps_logits else {}
            positions = batch.positions[None]
            out = self.module(input_ids=inputs, position_ids=positions, use_cache=False, **extra)
            logits: torch.Tensor = out.logits[0]
            return logits if self._keeps_logits else logits[kept]

    def prepare(self, pool: KVPool, max_sequences: int, longest: int) -> None:
        """On CUDA, compile all kernels for this pool, and from now on decode as CUDA graphs.

        The pool must be empty, and all later passes must use this pool. `longest` is the most tokens of a
        sequence. Takes seconds, unless Triton's cache on disk has the kernels.
        """
        if self.device.type == "cuda":
            from tiercache.engine.cuda_attention import KernelPass
            from tiercache.engine.decode_graphs import DecodeGraphs

            size = pool.layout.block_size
            segments = [BatchSegment(0, 0, size, [0])]
            # All groups write into the same block, whose content is never read.
            parts = [KernelPass(pool, segments, every_kernel=True) for _ in {place.group for place in pool.places}]
            work = parts[0] if len(parts) == 1 else GroupedPass(parts, pool.places)
            self.forward(attention.Batch(pool, segments, work), [0] * size, [])
            self._graphs = DecodeGraphs(self._run, max_sequences, longest)
