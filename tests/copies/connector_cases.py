"""Cases for a connector whose pool is on a GPU, over a real daemon; shared like `copier_cases`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from block_copy_cases import GUARD
from copier_cases import POOLS, WAIT_S
from waiting import wait_until

import tiercache
from tiercache.kernels.block_copy import gather_blocks_reference

ARENA, REGION = "64MiB", "16MiB"


class Client:
    """A connector and the tensors of its pool: 24 blocks of noise, equal in all clients.

    Attributes:
        layers: the pool's tensors, as `POOLS[form]` says.
        connector: connected to the daemon.
    """

    def __init__(self, address: str | Path, form: str, device: str, *, map_arena: bool = True) -> None:
        self.layers, self.axis = POOLS[form].make(device), POOLS[form].block_axis
        pool = tiercache.Pool.from_layers(self.layers, self.axis)
        pool.device = device  # a stand-in for a GPU has another device name than its tensors
        spec = tiercache.NamespaceSpec(
            engine="test/1", layout=form, dtype="bfloat16", block_size=4, block_bytes=pool.block_bytes
        )
        self.connector = tiercache.connect(
            address, namespace=spec, pool=pool, required=True, map_arena=map_arena, request_timeout_s=30.0
        )

    def bytes(self, block_ids: list[int]) -> torch.Tensor:
        """The content of blocks, uint8 `[block, bytes]` on the CPU."""
        return gather_blocks_reference(self.layers, block_ids, self.axis).cpu()

    def spoil(self) -> None:
        """Fill the whole pool with other bytes."""
        for layer in self.layers:
            layer.view(torch.uint8).fill_(GUARD)

    def await_registration(self) -> None:
        """Wait until every region is registered with CUDA."""
        arena = self.connector.client.session().arena
        assert arena is not None
        wait_until(lambda: arena.registration == "cuda" and not arena._populating)  # rule: no public name says it


def keys(name: str, blocks: int) -> bytes:
    """The packed keys of a chain of its own."""
    return tiercache.KeyChain(tiercache.root_key(name), 4, range(blocks * 4)).packed()


def check_store_and_load(address: str | Path, form: str, device: str, *, map_arena: bool) -> None:
    """What one client stores another loads into other blocks, and nothing else changes."""
    with ExitStack() as stack:
        first, second = (Client(address, form, device, map_arena=map_arena) for _ in range(2))
        stack.enter_context(first.connector)
        stack.enter_context(second.connector)
        ids, others = [5, 6, 7, 1, 23, 0, 12], [2, 3, 4, 20, 9, 8, 11]
        expected = first.bytes(ids)
        chain = keys(f"{form} {map_arena}", len(ids))
        if map_arena:
            first.await_registration()
        assert first.connector.store_async(chain, ids).result(WAIT_S) == (7, 0, 0, False)
        first.spoil()  # a finished store no longer needs its blocks
        second.spoil()
        match = second.connector.match(chain)  # its regions may be registered or not: both must do
        assert second.connector.load_async(match, others).result(WAIT_S) == 7
        if map_arena:
            second.await_registration()
        assert torch.equal(second.bytes(others), expected)
        untouched = [block for block in range(24) if block not in others]
        assert bool((second.bytes(untouched) == GUARD).all())
        assert first.connector.load(first.connector.match(chain), others[:3], first=4) == 3
        assert torch.equal(first.bytes(others[:3]), expected[4:])
