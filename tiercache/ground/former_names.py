"""Modules under the names that they had in 0.1, for programs that import them. Gone with 0.3.

`import tiercache.layout` imports `tiercache.protocol.namespaces`, the same module object, with a DeprecationWarning.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MOVED = {
    "tiercache": {
        "tiercache.client": "channel launch=launcher leases mapping session",
        "tiercache.config": "setting_kinds settings settings_schema",
        "tiercache.connector": "jobs loading=loads moves=mover storing=stores",
        "tiercache.connector.direct": "direct=loads direct_store=stores gds gds_backend=backend gds_moves=transfers "
        "gds_probe=probe gds_stage=probe_stage",
        "tiercache.copies": "arena copy_plan cuda cuda_driver cuda_lane host_memory memcpy transfer=pool",
        "tiercache.ground": "arguments extras forks isolated listening metrics=histograms uninterrupted units",
        "tiercache.protocol": "checksum=checksums curve hints keys layout=namespaces messages wire",
    },
    "tiercache.cli": {
        "tiercache.demo": "demo_chat=chat demo_child=child demo_model=model demo_prompt=prompt "
        "demo_vllm=vllm_worker demo_worker=worker",
        "tiercache.plan": "plan_known=known plan_model=model plan_sizes=sizes",
    },
    "tiercache.connectors": {
        "tiercache.connectors.transformers": "transformers_model=model transformers_watch=watch",
        "tiercache.connectors.vllm": "vllm_apart=apart vllm_built=built vllm_cards=cards vllm_compat=compat "
        "vllm_costs=costs vllm_events=events vllm_hashes=hashes vllm_hints=hints vllm_log=log vllm_names=names "
        "vllm_orders=orders vllm_pool=pool vllm_scheduler=scheduler vllm_settings=settings "
        "vllm_siblings=siblings vllm_stats=stats vllm_stores=stores vllm_tier_form=tier_form "
        "vllm_tier_jobs=tier_jobs vllm_tier_lookups=tier_lookups vllm_weights=weights "
        "vllm_worker=worker",
        "tiercache.connectors.weights": "module_facts weight_sample=sample",
    },
    "tiercache.daemon": {
        "tiercache.daemon": "ahead=prefetch inspect=inspection",
        "tiercache.daemon.events": "publisher",
        "tiercache.daemon.ground": "changes=health_log clock connections counters logs memory own_process "
        "priority=niceness regions rundir=run_directory slices",
        "tiercache.daemon.hints": "hinted=hinted_policy marks=chain_hints",
        "tiercache.daemon.index": "ages allocator frame_check index_check=check policy tails=chain_ends walks",
        "tiercache.daemon.observe": "histograms hotpaths=hot_prefixes http_process recorder reuse reuse_curve "
        "reuse_pace reuse_stack reuse_tails traffic",
        "tiercache.daemon.requests": "admin_requests=admin desk=context read_requests=reads remote router service "
        "sessions slow stats unsent write_requests=writes",
        "tiercache.daemon.tiers": "below=lower_tier nvme quotas unfinished",
        "tiercache.daemon.tiers.dram": "books=check cuts=match_ends growth=growing_run leases reads "
        "shares=region_shares space writes",
    },
    "tiercache.daemon.nvme": {
        "tiercache.daemon.tiers": "promotion",
        "tiercache.daemon.tiers.forms": "cipher codecs",
        "tiercache.daemon.tiers.nvme": "viewing=inspection",
        "tiercache.daemon.tiers.nvme.catalog": "catalog catalog_check database moved=closing rows",
        "tiercache.daemon.tiers.nvme.check": "checking=directory_check scanning=scan",
        "tiercache.daemon.tiers.nvme.direct": "extents grants",
        "tiercache.daemon.tiers.nvme.disk": "aside blockio=block_io directory disk health io=queue lock "
        "mounts segment_files superblock troubles",
        "tiercache.daemon.tiers.nvme.moves": "budget dirty offers writebehind",
    },
    "tiercache.replay": {
        "tiercache.replay": "swift=fast_cache",
    },
}
"""By the folder that they were in: where they are, and their names, `former=present` where that changed."""


@functools.cache
def _present_names() -> dict[str, str]:
    present = {}
    for former_folder, folders in _MOVED.items():
        for folder, names in folders.items():
            for name in names.split():
                former, _, now = name.partition("=")
                present[f"{former_folder}.{former}"] = f"{folder}.{now or former}"
    return present


class FormerNames:
    """A finder of modules (PEP 451). It is asked first: else a module of a folder that moved would be loaded twice."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """The spec of a module that moved, or None."""
        if not name.startswith("tiercache."):
            return None
        names = _present_names()
        folder, _, last = name.rpartition(".")
        present = names.get(name)
        if present is None and folder in names:  # in a folder that moved as a whole
            present = f"{names[folder]}.{last}"
            if importlib.util.find_spec(present) is None:
                return None
        return None if present is None else ModuleSpec(name, _Loader(present), origin=present)  # type: ignore[arg-type]


class _Loader:
    def __init__(self, present: str) -> None:
        self._present = present

    def get_code(self, name: str) -> Any:
        """For `python -m`."""
        found: Any = importlib.util.find_spec(self._present)
        return found.loader.get_code(self._present)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(f"{spec.name} is {self._present} now", DeprecationWarning, stacklevel=2)
        module = import_module(self._present)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run already: only its own spec comes back, which the import system has replaced."""
        module.__spec__ = self._spec


def install() -> None:
    """Find modules under their former names from here on, once for each process."""
    if not any(isinstance(finder, FormerNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, FormerNames())


def former_module(present: str) -> Any:
    """`__getattr__` of a folder that has the name of a former module: what that module had."""

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        module = import_module(present)
        if not hasattr(module, name):
            raise AttributeError(f"module {present.rpartition('.')[0]!r} has no attribute {name!r}")
        warnings.warn(f"{name} is in {present} now", DeprecationWarning, stacklevel=2)
        return getattr(module, name)

    return find
