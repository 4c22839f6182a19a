"""The scheduler's half of the vLLM connector by itself, with a cache and a vLLM as far as it needs them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus
from vllm_engines import PATIENCE_S, wait_until

from tiercache.connectors.vllm.costs import EngineCosts
from tiercache.connectors.vllm.scheduler import RequestPlanner
from tiercache.connectors.vllm.stores import EngineFacts
from tiercache.protocol.messages import KEY_BYTES
from tiercache.protocol.namespaces import NamespaceSpec

SIZE = 4
SPEC = NamespaceSpec(engine="t", layout="l", dtype="uint8", block_size=SIZE, block_bytes=64)


class Cache:
    """A connector that finds all blocks of everything when `go_on` is set."""

    namespace = SPEC
    available = True
    wants_events = False
    client = SimpleNamespace(request_timeout_s=PATIENCE_S)

    def __init__(self) -> None:
        self.below_blocks = self.shared_blocks = 0
        self.found_blocks: int | None = None
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.found: list[Any] = []
        self.released: list[Any] = []

    def match(self, keys: bytes, namespaces: Any) -> Any:
        self.asked.set()
        assert self.go_on.wait(PATIENCE_S)
        blocks = len(keys) // KEY_BYTES if self.found_blocks is None else self.found_blocks
        tiers = {"below_blocks": self.below_blocks, "shared_blocks": self.shared_blocks}
        self.found.append(SimpleNamespace(blocks=blocks, **tiers, ticket=lambda: b"ticket"))
        return self.found[-1]

    def release(self, match: Any) -> None:
        self.released.append(match)

    def close(self) -> None:
        """Nothing is open."""


class Names:
    """Requests have a root at once."""

    def read_later(self, who: str) -> None:
        """There is nothing to read."""

    def __init__(self) -> None:
        self.epochs = 0
        self.hangs, self.goes_on = threading.Event(), threading.Event()

    def root(self, lora_request: Any, own: bool = False) -> bytes:
        if lora_request is not None and lora_request.lora_path == "hangs":
            self.hangs.set()
            assert self.goes_on.wait(PATIENCE_S)
        return bytes([self.epochs, own]) * (KEY_BYTES // 2)

    def new_epoch(self) -> None:
        self.epochs += 1


class Rig:
    """A scheduler's half, and a vLLM as far as it needs one."""

    def __init__(self) -> None:
        self.cache = Cache()
        self.tables: dict[str, list[Any]] = {}
        manager = SimpleNamespace(req_to_blocks=self.tables)
        blocks = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=[manager]))
        blocks.block_pool = self.pool = SimpleNamespace(cached_block_hash_to_block={})
        cache: Any = self.cache
        self.names = Names()
        names: Any = self.names
        self.costs = EngineCosts(SIZE)
        self.scheduler = RequestPlanner(cache, EngineFacts([[SPEC]], 1), names, blocks, self.costs)

    def add(
        self,
        name: str,
        blocks: int,
        adapter: Any = None,
        media: Sequence[Any] = (),
        transfer: Any = None,
        rest: int = 1,
    ) -> Any:
        """A request of so many blocks and `rest` tokens; all requests begin alike."""
        request = SimpleNamespace(
            request_id=name,
            num_prompt_tokens=blocks * SIZE + rest,
            num_tokens=blocks * SIZE + rest,
            num_computed_tokens=0,
            num_preemptions=0,
            block_hashes=[bytes([block]) * 32 for block in range(blocks)],
            lora_request=adapter,
            kv_transfer_params=transfer,
            mm_features=media,
            resumable=False,
            status=RequestStatus.FINISHED_STOPPED,
        )
        self.tables[name] = [SimpleNamespace(block_id=block, is_null=False) for block in range(blocks)]
        self.scheduler.add(request)
        return request

    def looked_up(self) -> None:
        """Wait until all lookups and releases so far are done."""
        assert self.scheduler._lookups.finish(PATIENCE_S)

    def go_on(self) -> None:
        """Have lookups go on, and wait until all so far are done."""
        self.cache.go_on.set()
        self.looked_up()

    def load(self, request: Any, tokens: int) -> None:
        blocks = SimpleNamespace(blocks=[self.tables[request.request_id]])
        self.scheduler.allocated(request, blocks, tokens)

    def answer(self, request: Any) -> int:
        """The answer that vLLM gets in the end, as it asks again and again."""
        told: list[int] = []

        def asked() -> bool:
            tokens = self.scheduler.matched_tokens(request, 0)
            told.extend([] if tokens is None else [tokens])
            return bool(told)

        wait_until(asked)
        return told[0]

    def step(self, tokens: dict[str, int] | None = None, new: Sequence[Any] = ()) -> Any:
        """Schedules `tokens` of each request, of which some are `new`."""
        tokens = tokens or {}
        cached = SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set())
        started = [
            SimpleNamespace(req_id=each.request_id, num_computed_tokens=each.num_computed_tokens, block_ids=())
            for each in new
        ]
        output = SimpleNamespace(
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_new_reqs=started,
            scheduled_cached_reqs=cached,
            kv_cache_block_copies=None,
        )
        orders = self.scheduler.step(output)
        self.scheduler.check_integrity()
        return orders


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.cache.go_on.set()
    rig.names.goes_on.set()
    rig.scheduler.close()


def adapter(number: int, path: str, **options: Any) -> Any:
    """The request of an adapter, as vLLM hands it on; reading one whose path is "hangs" hangs."""
    return SimpleNamespace(lora_int_id=number, lora_path=path, **{"load_inplace": False, **options})
