"""A store that runs in a helper process."""

from __future__ import annotations

import contextlib

from tiercache.daemon.tiers.shared.stores.store import StoreError

from .connection import HelperConnection
from .supervisor import StoreSupervisor


class HelperStore:
    """`store.Store` by way of a helper process.

    Args:
        maker: `module:function` that makes the store from its URL, called in the process. The store may have a method
            `run_beside`, which the process runs in a thread, with what it tells of trouble.
        url, address, connections, pack_blocks: of the store.
    """

    def __init__(self, maker: str, url: str, address: str, connections: int, pack_blocks: int = 1) -> None:
        self.address = address
        self.connections = connections
        self.pack_blocks = pack_blocks
        self.supervisor = StoreSupervisor(maker, url, address)

    def connect(self) -> HelperConnection:
        """A new connection. The process starts now, so that it is there for the first call."""
        with contextlib.suppress(StoreError):  # the first call tries again
            self.supervisor.begin()
        return HelperConnection(self.supervisor)

    @property
    def trouble(self) -> str:
        """See `store.SharedStore`."""
        return self.supervisor.processes.trouble

    def stats(self) -> dict[str, object]:
        """Counts and state of the process, as plain values."""
        return self.supervisor.stats()

    def close(self) -> None:
        """End the process. Blocks for two seconds at most; calls under way end as UNREACHABLE."""
        self.supervisor.close()
