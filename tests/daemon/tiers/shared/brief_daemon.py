"""The daemon with short waits for its store: what they lead to is tested, not how long they are."""

from __future__ import annotations

import runpy

from tiercache.daemon.tiers.shared import access, breaker, flushes, lookups, presence, write_job
from tiercache.daemon.tiers.shared.stores.helper import supervisor

breaker.FIRST_PAUSE_S, breaker.LAST_PAUSE_S, breaker.RAMP_S = 0.1, 0.4, 0.2
lookups.LOOKUP_S = 0.5
presence.CLAIM_S, presence.NO_CLAIM_S, presence.UNFETCHABLE_S = 0.5, 0.1, 0.5
flushes.TOLD_S, flushes.FIRST_PAUSE_S, flushes.LAST_PAUSE_S = 1.0, 0.1, 0.4
write_job.WRITE_S = 2.0
access.CLOSE_S = 1.0
supervisor.FIRST_PAUSE_S = 0.05

if __name__ == "__main__":
    runpy.run_module("tiercache.daemon", run_name="__main__", alter_sys=True)
