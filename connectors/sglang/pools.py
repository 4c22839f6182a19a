"""SGLang's host memory as pools of blocks: a block is one page of one pool, as SGLang lays it out.

The layout decides of how many pieces a page consists: K and V of each layer (`layer_first`), or of all layers. Pages of
different layouts never meet: the layout is part of their namespace.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from tiercache.connector.connector import Connector
from tiercache.copies.pool import Pool, Segment
from tiercache.errors import LayoutError, ModelRefused
from tiercache.protocol.namespaces import NamespaceSpec

REPLICATED = (MLATokenToKVPoolHost, DSAIndexerPoolHost)
"""Pools that are equal on all tensor parallel ranks; the first one stores them."""


class HostPool(NamedTuple):
    """A pool of SGLang's that is served."""

    connector: Connector
    page_size: int
    stores: bool

    def pages(self, indices: Any, keys: int) -> npt.NDArray[np.int64]:
        """The pages that these indices of tokens fill. Raises LayoutError if they fill none, or not `keys` of them."""
        if indices is None or indices.numel() != keys * self.page_size:
            given = 0 if indices is None else indices.numel()
            raise LayoutError(f"{given} places for {keys} pages of {self.page_size} tokens")
        places = indices.cpu().numpy().reshape(keys, self.page_size)
        first = places[:, 0]
        if (first % self.page_size).any() or (places[:, -1] - first != self.page_size - 1).any():
            raise LayoutError("these places are not whole pages")
        if len(set(first.tolist())) != keys:
            raise LayoutError("two pages are in one place")
        pages: npt.NDArray[np.int64] = first // self.page_size
        return pages


def pool_of(name: str, host: Any) -> Pool:
    """The pages of a host pool. Raises ModelRefused for one that has no fixed places for them."""
    if (pages := getattr(host, "page_num", 0)) < 1:
        raise ModelRefused(f"SGLang's {name} pool is not memory of its own: such models are not served")
    probes = list(dict.fromkeys((0, min(1, pages - 1), pages - 1)))
    indices = torch.cat([torch.arange(page * host.page_size, (page + 1) * host.page_size) for page in probes])
    try:
        addresses, sizes = host.get_page_buffer_meta(indices)
    except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
        hint = "" if getattr(host, "layout", "") == "page_first" else ": set --hicache-mem-layout to page_first"
        raise ModelRefused(f"SGLang's {name} pool has no pages that can be stored in place ({error}){hint}") from error
    if (parts := len(addresses) // len(probes)) < 1:
        raise ModelRefused(f"SGLang's {name} pool shows no places of pages: it cannot be served")
    segments = []
    for part in range(parts):
        at, lengths = addresses[part::parts], set(sizes[part::parts])
        stride = at[1] - at[0] if pages > 1 else sizes[part]
        if len(lengths) != 1 or any(a != at[0] + page * stride for a, page in zip(at, probes, strict=True)):
            raise ModelRefused(f"the pages of SGLang's {name} pool are not evenly spaced: it cannot be served")
        segments.append(Segment(at[0], stride, sizes[part]))
    return Pool(segments, pages, "cpu", True, host)


def form_of(
    name: str, host: Any, pool: Pool, config: Any, page_tokens: int, window: int, version: str
) -> NamespaceSpec:
    """Everything that determines the form of a page's bytes, except what names the model.

    Args:
        config: SGLang's HiCacheStorageConfig.
        page_tokens: how many tokens a key stands for.
        window: how many pages at the end of a prefix are needed; 0 for all of them.
    """
    replicated = is_replicated(host, config)
    return NamespaceSpec(
        engine=f"sglang/{version}",
        layout=f"{type(host).__name__} {host.layout} {getattr(host, 'storage_format_tag', None)}",
        dtype=str(getattr(host, "dtype", "")),
        block_size=page_tokens,
        block_bytes=pool.block_bytes,
        layers=int(getattr(host, "layer_num", 0) or 0),
        kv_heads=int(getattr(host, "head_num", 0) or 0),
        head_dim=int(getattr(host, "head_dim", 0) or 0),
        group=name,
        tp_rank=0 if replicated else config.tp_rank,
        tp_size=1 if replicated else config.tp_size,
        pp_rank=config.pp_rank,
        pp_size=config.pp_size,
        window_blocks=window,
        extra={
            "pieces": " ".join(str(segment.bytes) for segment in pool.segments[:64]),
            "types": " ".join(str(getattr(host, f"{part}_dtype", None)) for part in ("temporal", "conv", "indexer")),
            "layers": f"{getattr(host, 'start_layer', None)} {getattr(host, 'end_layer', None)}",
            "context parallel": f"{config.attn_cp_rank} of {config.attn_cp_size}",
        },
    )


def is_replicated(host: Any, config: Any) -> bool:
    """True if all tensor parallel ranks have the same bytes in this pool."""
    return config.is_mla_model and isinstance(host, REPLICATED) and not getattr(host, "_layer_shard_enabled", False)
