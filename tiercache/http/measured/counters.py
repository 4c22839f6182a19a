"""The daemon's counters: each is a metric under its own name."""

from __future__ import annotations

from tiercache.http import readings as read
from tiercache.http.measured.family import Family

COUNTERS = {
    "match_requests": "Requests that looked up a prompt's blocks, including prefetches.",
    "match_blocks_asked": "Blocks that clients looked up, including prefetches.",
    "match_blocks_hit": "Blocks that were looked up and found in DRAM.",
    "match_blocks_below": "Blocks that were looked up and found below DRAM (on NVMe or in the shared store), beyond "
    "those found in DRAM.",
    "match_blocks_shared": "Blocks that were looked up and found in the shared store alone; part of "
    "match_blocks_below. They were claimed: what could not be fetched is computed.",
    "loads_good": "Loads that the daemon confirmed after the client had copied the blocks.",
    "loads_revoked": "Loads that the daemon revoked before the client had copied the blocks; the client computes "
    "them instead.",
    "reserved_blocks": "Blocks for which a client was given a frame of the arena to write to.",
    "dedup_blocks": "Blocks that a client offered and that were stored already, or were being stored by another "
    "client.",
    "refused_blocks": "Blocks that were not stored because no frame of the arena was free for them.",
    "refused_by_quota_blocks": "Blocks that were not stored because the client's quota left no room; part of "
    "refused_blocks.",
    "refused_populating_blocks": "Blocks that were not stored because the arena was still being populated after the "
    "daemon's start; part of refused_blocks.",
    "stored_blocks": "Blocks that clients have stored in DRAM.",
    "stored_bytes": "Bytes of the blocks that clients have stored in DRAM.",
    "dropped_blocks": "Blocks whose store was begun and never finished.",
    "evicted_blocks": "Blocks evicted from DRAM to make room; they may still be on NVMe.",
    "flushed_blocks": "Blocks removed by `tiercache flush`.",
    "flushes": "Calls of `tiercache flush`.",
    "leases_expired": "Loads and stores that the daemon ended because the client did not renew them in time.",
    "quarantines": "Stores whose client went away before it said that its copies had ended; their frames wait for "
    "its process to exit.",
    "regions_drained": "Regions of the arena that were emptied to hold blocks of another size.",
    "broken_chains": "Lists of keys from clients that are not chains: a client repeats, leaves out or mixes keys. The "
    "sessions in `tiercache stats --json` say which client; 0 with correct clients.",
    "payload_bytes_read": "Bytes of blocks sent in messages to clients that do not share the arena's memory.",
    "payload_bytes_written": "Bytes of blocks received in messages from clients that do not share the arena's memory.",
    "requests": "Requests that the daemon received.",
    "requests_malformed": "Requests that are not a valid message of the protocol.",
    "requests_refused": "Requests that were answered with an error.",
    "requests_expired": "Requests that the daemon did not carry out because their deadline had passed.",
    "requests_slow": "Requests that took longer than the setting slow_request; each has a line in the log.",
    "requests_failed": "Requests during which the daemon itself failed; each has a traceback in the log. 0 in a "
    "healthy system.",
    "sessions_opened": "Connections that clients opened and the daemon accepted.",
    "sessions_refused": "Connections that the daemon refused, for example beyond max_sessions or without a common "
    "protocol version.",
    "sessions_cut": "Connections that the daemon ended, for example of a client that did not read its replies.",
    "handshakes_refused": "Connections from other hosts whose key is not among the allowed clients.",
    "loop_stalls": "Times that the daemon's event loop stood still for more than 0.1 s, usually for want of a "
    "processor.",
    "connections_refused": "Connections to the control socket beyond its limit.",
}
"""The daemon's counters, by their names in the stats."""

COUNTED = tuple(
    Family("counter", f"{name}_total", (), text, read.at("counters", name)) for name, text in COUNTERS.items()
)
