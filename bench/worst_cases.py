"""The cases of `bench_worst.py`, by the part of the daemon that they load: each asks for the most that a client can."""

from __future__ import annotations

import worst_flushes
import worst_leases
import worst_lookups
import worst_nvme
import worst_service

CASES = (
    *worst_lookups.CASES,
    *worst_leases.CASES,
    *worst_flushes.CASES,
    *worst_service.CASES,
    *worst_nvme.CASES,
)
