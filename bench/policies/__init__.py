"""Eviction policies that the daemon does not have: what `lru` and `hazard` are compared with; see ../POLICIES.md.

    arc, s3fifo, wtinylfu     queues of blocks (`queues`), with `ghosts` of evicted ones or a `sketch` of frequencies
    workload_aware            reuse times by kind of request (`reusetimes`), learnt from the predictor's sample
    requests                  what counts as a use of blocks

They have the interface of the daemon's own (`daemon/index/policy.py`) and are made in the same way, so the simulator
runs them on the daemon's index, behind the same window of fresh stores. The daemon itself never loads them.
"""

from __future__ import annotations

from collections.abc import Mapping

from policies.arc import ARC
from policies.requests import Requests
from policies.reusetimes import ReuseTimes
from policies.s3fifo import S3FIFO
from policies.sketch import Sketch
from policies.workload_aware import WorkloadAware
from policies.wtinylfu import WTinyLFU
from tiercache.daemon.policies import POLICIES, Made, Maker
from tiercache.daemon.policies.turnover import Turnover

__all__ = ["ALL", "COMPARED"]


def _arc(turnover: Turnover, secret: int) -> Made:
    return Made(ARC, Requests(turnover))


def _s3fifo(turnover: Turnover, secret: int) -> Made:
    return Made(S3FIFO, Requests(turnover))


def _wtinylfu(turnover: Turnover, secret: int) -> Made:
    sketch = Sketch(turnover)
    return Made(lambda index: WTinyLFU(index, sketch), sketch)


def _workload_aware(turnover: Turnover, secret: int) -> Made:
    times = ReuseTimes(turnover, secret)
    return Made(lambda index: WorkloadAware(index, times), times, in_hits=True)


COMPARED: Mapping[str, Maker] = {
    "arc": _arc,
    "s3fifo": _s3fifo,
    "wtinylfu": _wtinylfu,
    "workload-aware": _workload_aware,
}
ALL: Mapping[str, Maker] = {**POLICIES, **COMPARED}
"""All policies: the daemon's and the compared ones."""
