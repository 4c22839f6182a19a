"""The identity of a model's KV: names under which other engines find the same KV, and only the same."""

from __future__ import annotations

from pathlib import Path

import torch

from tiercache.engine.kv_pool import RAW, KVLayout
from tiercache.engine.layer_groups import LayerGroup
from tiercache.engine.model import ModelShape, choose_device, read_shape, weight_files
from tiercache.engine.packed_linear import can_pack
from tiercache.engine.settings import EngineSettings
from tiercache.errors import ConfigError
from tiercache.protocol.keys import content_id, fingerprint_files, salted_root
from tiercache.protocol.namespaces import NamespaceSpec

ENGINE_NAME = "tiercache/1"
BLOCK_LAYOUT = "layer,2,slot,kv_head,head_dim"
RECORD_LAYOUT = "layer,record"


def describe_model(
    model_dir: str | Path, settings: EngineSettings | None = None, *, epoch: int = 0
) -> tuple[list[NamespaceSpec], bytes]:
    """The namespaces of a model's blocks and the root key of its chains: `identify_model`, and the salt."""
    settings = settings or EngineSettings()
    namespaces, content = identify_model(model_dir, settings, epoch=epoch)
    return namespaces, salted_root(content, settings.salt)


def identify_model(
    model_dir: str | Path, settings: EngineSettings, *, epoch: int = 0
) -> tuple[list[NamespaceSpec], bytes]:
    """The namespace of each group of layers (most models have one) and the `content_id` of what computes the blocks.

    Reads config.json and every byte of the weights, at the speed of the disk. With `exact`, torch's version and
    the device are part of the namespaces. Raises ModelRefused and ConfigError.
    """
    shape = read_shape(model_dir, settings)
    groups = shape.groups(settings).groups
    namespaces = [_namespace(shape, group, len(groups) > 1, settings) for group in groups]
    content = fingerprint_files([*weight_files(model_dir), Path(model_dir) / "config.json"])
    # Exact reuse needs the same split of the prefill, which depends on the chunk size.
    split = f"{settings.chunk_size}" if settings.exact else "any"
    parts = [("split", split)]
    if settings.attention_window:
        # A token's K and V in all layers but the first depend on what it sees.
        parts.append(("attention", f"{settings.attention_window} after {settings.sink_tokens}"))
    return namespaces, content_id(content, epoch=epoch, extra=parts)


def file_states(model_dir: str | Path) -> list[tuple[str, int, int, int]]:
    """A value that changes when one of a model's files is replaced or written to."""
    files = [*weight_files(model_dir), Path(model_dir) / "config.json"]
    states = [(file.name, file.stat()) for file in map(Path, files)]
    return [(name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in states]


def _namespace(shape: ModelShape, group: LayerGroup, mixed: bool, settings: EngineSettings) -> NamespaceSpec:
    """The namespace of a group's blocks. Places without a layer are not stored."""
    layout = tier_layout(shape, group, settings)
    name = "window" if group.window.size else "full"
    namespace = NamespaceSpec(
        engine=ENGINE_NAME,
        layout=BLOCK_LAYOUT if layout.format == RAW else RECORD_LAYOUT,
        dtype=str(shape.dtype).removeprefix("torch."),
        block_size=settings.block_size,
        block_bytes=layout.block_bytes,
        layers=layout.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        group=f"{name}: layers {' '.join(map(str, group.layers))}" if mixed else name,
        quantization="none" if layout.format == RAW else layout.format,
        window_blocks=group.window.blocks,
        extra=_arithmetic(settings, shape.dtype) if settings.exact else {},
    )
    if problem := namespace.problem():
        raise ConfigError(f"{problem}; change block_size")
    return namespace


def tier_layout(shape: ModelShape, group: LayerGroup, settings: EngineSettings) -> KVLayout:
    """The layout of a group's blocks in the cache's tiers. Raises ConfigError."""
    name = settings.kv_cache_dtype if settings.tier_dtype == "auto" else settings.tier_dtype
    return shape.kv_layout(settings.block_size, name, len(group.layers))


def _arithmetic(settings: EngineSettings, dtype: torch.dtype) -> dict[str, str]:
    """What determines the last bits of a result: blocks computed with anything else may differ from ours."""
    device = choose_device(settings.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    linear = "packed" if can_pack(dtype, device) else "plain"
    return {"torch": str(torch.__version__), "device": f"{device.type} {name}", "linear": linear}
