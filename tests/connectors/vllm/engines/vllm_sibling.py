"""A connector beside ours in a MultiConnector, which brings KV as Nixl does for a remote prefill, but as noise.

For prompts that begin with FOREIGN it fills all full blocks asynchronously, where `when` says: in the hook before a
step (`hook`), where some connectors begin to write, or after it (`start`). When it has, it touches the file `go` in
`folder`, and gives a copy that waits for that the time to end. It has handshake metadata, and wants no other's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base

FOREIGN = 7
BLOCK = 32


@dataclass
class Fills(base.KVConnectorMetadata):  # type: ignore[misc]
    """Requests, and the blocks that are filled for them."""

    blocks: dict[str, list[int]]


@dataclass
class Handshake(base.KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Metadata as Nixl's."""

    agent: bytes = b"agent"


class Sibling(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
    """See the module's docstring."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self.when, self.folder = extra["when"], Path(extra["folder"])
        self.wanted: dict[str, list[int]] = {}
        self.filled: set[str] = set()
        self.caches: list[torch.Tensor] = []

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = list(kv_caches.values())

    def get_handshake_metadata(self) -> Handshake:
        return Handshake()

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        if not all(isinstance(each, Handshake) for each in metadata.values()):
            raise ValueError("this is not the handshake that was sent")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if request.prompt_token_ids[0] != FOREIGN or num_computed_tokens:
            return 0, False
        return (request.num_tokens - 1) // BLOCK * BLOCK, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            filled = blocks.blocks[0][: num_external_tokens // BLOCK]
            self.wanted[request.request_id] = [block.block_id for block in filled]

    def build_connector_meta(self, scheduler_output: Any) -> Fills:
        fills, self.wanted = Fills(self.wanted), {}
        return fills

    def handle_preemptions(self, kv_connector_metadata: Fills) -> None:
        if self.when == "hook":
            self.fill(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.when == "start":
            self.fill(self._connector_metadata)

    def fill(self, fills: Any) -> None:
        for request_id, blocks in fills.blocks.items():
            for cache in self.caches:
                cache[blocks] = torch.randn(cache[blocks].shape, dtype=cache.dtype)
            self.filled.add(request_id)
            (self.folder / "go").touch()
            deadline_s = time.monotonic() + 60
            while any(self.folder.glob("held*")) and not (self.folder / "copied").exists():
                if time.monotonic() > deadline_s:
                    raise TimeoutError("the copy that was held has not ended")
                time.sleep(0.005)  # rule: the gate is another process's file

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        filled, self.filled = self.filled, set()
        return base.KVConnectorTransferResults(finished_recving=filled)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None
