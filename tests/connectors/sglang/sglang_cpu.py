"""What SGLang's cache needs to run without a GPU: stand-ins for packages, and its copies in plain torch.

Of SGLang this replaces the kernels that copy between the pools of a device and of the host, and the page-locking of the
host's. Everything else is what SGLang runs on a GPU.
"""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any
from unittest import mock

ABSENT = ("torchvision", "torchaudio", "torchcodec", "timm", "datasets")


class _Anything(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=f"{self.__name__}.{name}")


class _Finder:
    """Finds the absent packages and their modules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


def stand_in() -> None:
    """Make SGLang's cache usable in this process. Before SGLang is imported."""
    from transformers import AutoConfig, AutoModel, AutoProcessor, AutoTokenizer  # noqa: F401  # they look for torchvision

    sys.meta_path.append(_Finder())  # type: ignore[arg-type]
    from sglang.srt.mem_cache.pool_host import common, mamba, mha

    common._cuda_host_register = lambda *_: None
    common._cuda_host_unregister = lambda *_: None
    for pool in (mha.MHATokenToKVPoolHost, mamba.MambaPoolHost):
        pool_module = sys.modules[pool.__module__]
        for name in ("_cuda_host_register", "_cuda_host_unregister"):
            if hasattr(pool_module, name):
                setattr(pool_module, name, lambda *_: None)
    mha.MHATokenToKVPoolHost.load_to_device_per_layer = _load_kv
    mha.MHATokenToKVPoolHost.backup_from_device_all_layer = _back_up_kv
    mamba.MambaPoolHost._copy_tensor_pf_lf = staticmethod(_load_state)
    mamba.MambaPoolHost._copy_tensor_all_layers_lf_pf = staticmethod(_back_up_state)
    from sglang.srt.mem_cache.pool_host import base

    base._cuda_host_unregister = lambda *_: None
    # SGLang leaves 10 GiB of the host's memory alone. Pools here are small, and others may have the rest.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    from sglang.test.kits.unified_radix_cache import fixtures

    fixtures.get_device = lambda: "cpu"


def _at(pool: Any, indices: Any) -> Any:
    """Where tokens are in one layer of a host pool."""
    return (indices // pool.page_size, indices % pool.page_size) if pool.layout == "page_first_direct" else indices


def _load_kv(
    pool: Any, device_pool: Any, host_indices: Any, device_indices: Any, layer: int, *_: Any, **__: Any
) -> None:
    if 0 <= layer < pool.target_layer_num:
        pool.device_k_buffers[layer][device_indices] = pool.k_data_refs[layer][_at(pool, host_indices)]
        pool.device_v_buffers[layer][device_indices] = pool.v_data_refs[layer][_at(pool, host_indices)]


def _back_up_kv(pool: Any, device_pool: Any, host_indices: Any, device_indices: Any, *_: Any) -> None:
    for layer in range(pool.layer_num):
        pool.k_data_refs[layer][_at(pool, host_indices)] = pool.device_k_buffers[layer][device_indices]
        pool.v_data_refs[layer][_at(pool, host_indices)] = pool.device_v_buffers[layer][device_indices]


def _load_state(src: Any, dst: Any, src_indices: Any, dst_indices: Any, layer_id: int, **_: Any) -> None:
    dst[dst_indices] = src[src_indices, layer_id, 0]


def _back_up_state(src_layers: Any, dst: Any, src_indices: Any, dst_indices: Any, num_layers: int, **_: Any) -> None:
    for layer in range(num_layers):
        dst[dst_indices, layer, 0] = src_layers[layer][src_indices]
