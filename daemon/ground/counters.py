"""The daemon's counters, in the order `stats` shows them. Blocks unless the name says otherwise."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Plain integers, only ever raised, on the event loop."""

    match_requests: int = 0
    match_blocks_asked: int = 0
    match_blocks_hit: int = 0
    match_blocks_below: int = 0
    match_blocks_shared: int = 0
    loads_good: int = 0
    loads_revoked: int = 0
    reserved_blocks: int = 0
    dedup_blocks: int = 0
    refused_blocks: int = 0
    refused_by_quota_blocks: int = 0
    refused_populating_blocks: int = 0
    stored_blocks: int = 0
    stored_bytes: int = 0
    dropped_blocks: int = 0
    evicted_blocks: int = 0
    flushed_blocks: int = 0
    flushes: int = 0
    leases_expired: int = 0
    quarantines: int = 0
    regions_drained: int = 0
    broken_chains: int = 0
    payload_bytes_read: int = 0
    payload_bytes_written: int = 0
    requests: int = 0
    requests_malformed: int = 0
    requests_refused: int = 0
    requests_expired: int = 0
    requests_failed: int = 0
    requests_slow: int = 0
    sessions_opened: int = 0
    sessions_refused: int = 0
    sessions_cut: int = 0
    handshakes_refused: int = 0
    loop_stalls: int = 0
