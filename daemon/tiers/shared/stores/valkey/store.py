"""A Valkey store: what a URL names, and connections to it."""

from __future__ import annotations

from tiercache.daemon.tiers.shared.stores.store import Connection

from .cluster import Cluster
from .connection import OneServer
from .url import ValkeySettings, read_url


class ValkeyStore:
    """A configured store. See `SharedStore`."""

    pack_blocks = 1
    trouble = ""

    def __init__(self, settings: ValkeySettings) -> None:
        self._settings = settings
        self.address = settings.address
        self.connections = settings.connections

    def connect(self) -> Connection:
        """A new connection, not yet open."""
        return Cluster(self._settings) if self._settings.cluster else OneServer(self._settings)

    def close(self) -> None:
        """Its connections share nothing."""


def open_valkey(url: str) -> ValkeyStore:
    """The store that a URL names. Uses no network. Raises ConfigError; its text never has the password."""
    return ValkeyStore(read_url(url))
