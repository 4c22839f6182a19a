"""KV events: which block is in which tier, for routers that send a request to where its prefix is.

index, tiers ──► events: batches ──► publisher: PUB, and a ROUTER that resends missed batches
"""

from typing import TYPE_CHECKING

from tiercache.ground.former_names import former_module

if not TYPE_CHECKING:  # `tiercache.daemon.events` was a module in 0.1
    __getattr__ = former_module("tiercache.daemon.events.events")
