"""What the hooks of the connector for vLLM cost by themselves, with stand-ins for vLLM and the daemon.

    hot     one batch of requests after another
    cold    before every call other memory is used, as a step of a model does: nothing of ours is in the caches

In microseconds that the thread ran; a hook that does nothing is among them, for cold that takes its time too.
`bench_vllm_hooks.py` measures the hooks in a real vLLM, where both kinds and the turns of other threads are mixed.
Needs the environment of `make test-vllm`: `PYTHONPATH=. .venv-vllm/bin/python bench/bench_vllm_books.py [--batches N]`
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import Report, percentile
from vllm.v1.request import RequestStatus

from tiercache.connector.loads import Match
from tiercache.connectors.vllm.orders import Orders, WorkerReport
from tiercache.connectors.vllm.scheduler import RequestPlanner
from tiercache.connectors.vllm.stores import EngineFacts
from tiercache.protocol.namespaces import NamespaceSpec

BLOCK = 32
BATCH = 8
PROMPT_BLOCKS = 4
OTHER_BYTES = 32 << 20
SPEC = NamespaceSpec(engine="bench", layout="bytes", dtype="uint8", block_size=BLOCK, block_bytes=65536)
HIT: Any = SimpleNamespace(blocks=PROMPT_BLOCKS, below_blocks=0, shared_blocks=0, ticket=lambda: b"ticket")


class Cache:
    """A connector that finds everything, or nothing, at once."""

    namespace = SPEC
    available = True
    wants_events = False
    client = SimpleNamespace(request_timeout_s=60.0)
    hits = False

    def match(self, keys: bytes, namespaces: Any) -> Match:
        return HIT if self.hits else Match()  # type: ignore[no-any-return]

    def release(self, match: Match) -> None:
        """Nothing: there is no daemon."""

    def close(self) -> None:
        """Nothing."""


class Names:
    """All requests are of one model."""

    def read_later(self, who: str) -> None:
        """Nothing: there are no weights to read."""

    def root(self, lora_request: Any, own: bool = False) -> bytes:
        return b"r" * 16


class Rig:
    """The scheduler's half, and what each of its hooks has taken, in microseconds."""

    def __init__(self) -> None:
        self.cache = Cache()
        self.tables: dict[str, list[Any]] = {}
        manager = SimpleNamespace(req_to_blocks=self.tables)
        blocks = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=[manager]))
        cache: Any = self.cache
        names: Any = Names()
        self.scheduler = RequestPlanner(cache, EngineFacts([[SPEC]], 1), names, blocks)
        self.took_us: dict[str, list[float]] = defaultdict(list)
        self._other = np.zeros(OTHER_BYTES, np.uint8), np.ones(OTHER_BYTES, np.uint8)

    def call(self, name: str, cold: bool, hook: Callable[..., Any], *arguments: Any) -> Any:
        """One call of a hook."""
        if cold:
            np.copyto(*self._other)
        start_ns = time.thread_time_ns()
        result = hook(*arguments)
        self.took_us[f"{name} {'cold' if cold else 'hot'}"].append((time.thread_time_ns() - start_ns) / 1000)
        return result

    def batch(self, name: str, hits: bool, cold: bool) -> None:
        """Requests from arrival to end, and what workers then report of them."""
        self.cache.hits = hits
        scheduler = self.scheduler
        requests = [make_request(f"{name} {number}") for number in range(BATCH)]
        for request in requests:
            self.call("on_new_request", cold, scheduler.add, request)
        scheduler.step(make_output({}))
        assert scheduler._lookups.finish(60)
        jobs: list[int] = []
        for request in requests:
            tokens = self.call("get_num_new_matched_tokens", cold, scheduler.matched_tokens, request, 0)
            assert tokens == (PROMPT_BLOCKS * BLOCK if hits else 0)
            table = [SimpleNamespace(block_id=block, is_null=False) for block in range(PROMPT_BLOCKS)]
            self.tables[request.request_id] = table
            blocks = SimpleNamespace(blocks=[table])
            self.call("update_state_after_alloc", cold, scheduler.allocated, request, blocks, tokens)
        jobs += self.step({request.request_id: 1 if hits else PROMPT_BLOCKS * BLOCK for request in requests}, cold)
        if hits:
            loaded = {request.request_id for request in requests}
            self.call("update_connector_output", cold, scheduler.loads_ended, loaded, set())
        for request in requests:
            request.num_computed_tokens = PROMPT_BLOCKS * BLOCK
            self.call("request_finished_all_groups", cold, scheduler.finished, request)
            del self.tables[request.request_id]
        del request, requests
        jobs += self.step({}, cold)
        if jobs:
            report = WorkerReport(dict.fromkeys(jobs, 1))
            self.call("update_connector_output", cold, scheduler.stores.reported, report)
        self.call("nothing", cold, lambda: None)
        scheduler.check_integrity()

    def step(self, tokens: dict[str, int], cold: bool) -> list[int]:
        """The ids of the stores that this step begins."""
        orders: Orders = self.call("build_connector_meta", cold, self.scheduler.step, make_output(tokens))
        return [store.job_id for store in (*orders.ready, *orders.fresh)]


def make_request(name: str) -> Any:
    """What the connector needs of vLLM's."""
    hashes = [f"{name} {number}".encode().ljust(32) for number in range(PROMPT_BLOCKS)]
    return SimpleNamespace(
        request_id=name,
        num_tokens=PROMPT_BLOCKS * BLOCK,
        num_prompt_tokens=PROMPT_BLOCKS * BLOCK,
        num_computed_tokens=0,
        num_preemptions=0,
        mm_features=(),
        skip_reading_prefix_cache=False,
        resumable=False,
        block_hashes=hashes,
        lora_request=None,
        kv_transfer_params=None,
        status=RequestStatus.FINISHED_STOPPED,
    )


def make_output(tokens: dict[str, int]) -> Any:
    """What vLLM's scheduler has decided."""
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set())
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=cached,
        kv_cache_block_copies=None,
    )


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=40, help="of each kind: known or not, hot or cold")
    args = parser.parse_args()
    report, rig = Report("bench_vllm_books"), Rig()
    rig.batch("warm-up", False, False)
    rig.took_us.clear()
    gc.collect()
    gc.freeze()
    for number in range(args.batches):
        for kind in range(4):
            rig.batch(f"{number} {kind}", hits=bool(kind & 1), cold=bool(kind & 2))
    for name, values in rig.took_us.items():
        middle, late = percentile(values, 0.5), percentile(values, 0.99)
        label = f"{name}, p99 of {len(values)} (p50 {middle:.1f})"
        limit = 20 if name.endswith("hot") else None
        report.add(f"{name.replace(' ', '_')}_us_p99", label, late, "us", at_most=limit)
    report.finish()
    rig.scheduler.close()


if __name__ == "__main__":
    main()
