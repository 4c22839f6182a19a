"""The store in the memory of hosts: as the daemon has it, and as it is in its helper process."""

from __future__ import annotations

import math

from tiercache.daemon.tiers.shared.stores.helper.store import HelperStore
from tiercache.daemon.tiers.shared.stores.mooncake.client import MooncakeClient, prepare_process
from tiercache.daemon.tiers.shared.stores.mooncake.connection import VALUES_TOGETHER, MooncakeConnection
from tiercache.daemon.tiers.shared.stores.mooncake.library import check_library
from tiercache.daemon.tiers.shared.stores.mooncake.settings import parse_mooncake_url


class MooncakeStore:
    """`store.Store` by Mooncake. Its calls may hang or crash: `pooled_memory` runs it in a helper."""

    pack_blocks = 1

    def __init__(self, url: str) -> None:
        self.settings = parse_mooncake_url(url)
        self.address = self.settings.address
        self.connections = self.settings.connections
        self._client = MooncakeClient(self.settings)

    def connect(self) -> MooncakeConnection:
        return MooncakeConnection(self._client)

    def close(self) -> None:
        """The process ends, and so does the client."""

    def run_beside(self) -> None:
        """Starts the client and looks after it; never returns. The helper runs it in a thread."""
        self._client.run()


def mooncake_in_helper(url: str) -> MooncakeStore:
    """The store, in a process of its own."""
    prepare_process()
    return MooncakeStore(url)


def pooled_memory(url: str) -> HelperStore:
    """The store, as the daemon has it. Raises ConfigError."""
    settings = parse_mooncake_url(url)
    check_library(settings.address)
    its = url, settings.address, settings.connections
    # While its client starts no other thread of the process gets on, for as long as that takes.
    return HelperStore(f"{__name__}:mooncake_in_helper", *its, puts_together=VALUES_TOGETHER, silent_s=math.inf)
