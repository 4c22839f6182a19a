"""SGLang's HiCache over tiercache: one batch of pages into SGLang's host memory and out of it, and lookups.

    get       batch_get_v1 of 128 pages of 1 MiB that are in the daemon's DRAM, beside a plain copy of as many bytes to
              the same places, in the same pieces
    set       batch_set_v1 of 128 new pages
    exists    batch_exists of 1,024 pages that are stored, and of 1,024 of which none is
    salted    the same with a `salt`, which takes a keyed hash of each page

SGLang's own host pools (MHA, `page_first`) on a CPU; daemons of its own; all in turns, medians. Needs the environment
of `make test-sglang`: `PYTHONPATH=. .venv-sglang/bin/python bench/bench_sglang.py [--rounds N]`
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import SEED, Report

import tiercache

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/connectors/sglang"))

median = statistics.median
BATCH_PAGES = 128
LOOKUP_PAGES = 1024
PAGE_TOKENS = 64
MIB = 1 << 20


def hashes(count: int, salt: object) -> list[str]:
    """What SGLang's would look like."""
    return [hashlib.sha256(f"{SEED} {salt} {number}".encode()).hexdigest() for number in range(count)]


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


def await_arena(address: str) -> None:
    """Until a daemon has all of its memory."""
    with tiercache.Client.connect(address, map_arena=False) as client:
        while client.stats()["health"].get("parts", {}).get("arena"):
            time.sleep(0.1)


class Bench:
    """SGLang's pools over daemons."""

    def __init__(self, folder: Path) -> None:
        import sglang_cpu

        sglang_cpu.stand_in()
        import torch
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
        from sglang_rig import save_model

        self.torch = torch
        set_global_server_args_for_scheduler(ServerArgs(model_path=str(save_model(folder / "model")), device="cpu"))
        self._config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "model")
        self.at_root = HiCacheStorageExtraInfo(prefix_keys=[])

    def host(self, pages: int, layers: int, heads: int) -> Any:
        """A host pool of SGLang's with so many pages, and as many more."""
        from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _build_mha_mla_host_pool
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        pool = MHATokenToKVPool(
            size=PAGE_TOKENS,
            page_size=PAGE_TOKENS,
            dtype=self.torch.bfloat16,
            head_num=heads,
            head_dim=64,
            layer_num=layers,
            device="cpu",
            enable_memory_saver=False,
        )
        host = _build_mha_mla_host_pool(
            pool=pool,
            host_to_device_ratio=2 * pages,
            page_size=PAGE_TOKENS,
            layout="page_first",
            allocator_type="default",
            pool_label="kv",
        )
        host.kv_buffer.view(self.torch.uint8).random_()
        return host

    def backend(self, host: Any, **settings: Any) -> Any:
        """A backend for a host pool, when it knows the name of the model."""
        from tiercache.connectors.sglang_hicache import TierCacheHiCache

        extra = {"interface_v1": 1, **settings}
        backend = TierCacheHiCache(dataclasses.replace(self._config, extra_config=extra), {})
        backend.register_mem_pool_host(host)
        assert backend.names is not None
        assert backend.names.wait(60)
        return backend

    def places(self, first: int, count: int) -> Any:
        """Of so many pages in host memory."""
        return self.torch.arange(first * PAGE_TOKENS, (first + count) * PAGE_TOKENS)


def add_transfers(report: Report, bench: Bench, address: str, rounds: int) -> None:
    """A batch of 1 MiB pages, in turns with a plain copy."""
    host = bench.host(BATCH_PAGES, layers=16, heads=4)
    backend = bench.backend(host, address=address)
    sources, targets = bench.places(0, BATCH_PAGES), bench.places(BATCH_PAGES, BATCH_PAGES)
    pieces = [host.k_buffer.view(bench.torch.uint8).numpy(), host.v_buffer.view(bench.torch.uint8).numpy()]
    pieces = [array.reshape(-1, array.size // host.page_num) for array in pieces]
    plain = [piece[:BATCH_PAGES].copy() for piece in pieces]
    size = BATCH_PAGES * sum(piece.shape[1] for piece in pieces)
    assert size == BATCH_PAGES * MIB

    def copy() -> None:
        for piece, source in zip(pieces, plain, strict=True):
            for page in range(BATCH_PAGES):
                np.copyto(piece[BATCH_PAGES + page], source[page])

    times: dict[str, list[float]] = {"set": [], "get": [], "copy": []}
    for number in range(rounds + 1):
        keys = hashes(BATCH_PAGES, number)
        stored: list[bool] = []
        set_s = seconds(
            lambda keys=keys, stored=stored: stored.extend(backend.batch_set_v1(keys, sources, bench.at_root))
        )
        good: list[bool] = []
        copy_s = seconds(copy)
        get_s = seconds(lambda keys=keys, good=good: good.extend(backend.batch_get_v1(keys, targets, bench.at_root)))
        assert all(stored)
        assert all(good)
        if number:  # the first one warms up
            for name, value in (("set", set_s), ("get", get_s), ("copy", copy_s)):
                times[name].append(value)
    assert all(np.array_equal(piece[:BATCH_PAGES], piece[BATCH_PAGES : 2 * BATCH_PAGES]) for piece in pieces)
    backend.close()
    for name, label in (("set", "batch_set_v1"), ("get", "batch_get_v1"), ("copy", "a plain copy")):
        speeds = [size / value / 1e9 for value in times[name]]
        report.add(f"{name}_gb_s", f"{label} of {BATCH_PAGES} pages of 1 MiB", median(speeds), "GB/s", samples=speeds)
    ratios = [copied / got for copied, got in zip(times["copy"], times["get"], strict=True)]
    report.add("get_over_copy", "batch_get_v1 / a plain copy", median(ratios), at_least=0.8, samples=ratios)


def lookup_seconds(backend: Any, keys: list[str], expected: int) -> float:
    """How long a lookup takes that finds so many pages."""
    begin_s = time.perf_counter()
    found = backend.batch_exists(keys, None)
    took_s = time.perf_counter() - begin_s
    assert found == expected
    return took_s


def add_lookups(report: Report, bench: Bench, address: str, rounds: int) -> None:
    """Lookups of many small pages."""
    host = bench.host(LOOKUP_PAGES, layers=1, heads=1)
    for name, settings, limit in (("exists", {}, 0.3), ("salted_exists", {"salt": "a secret"}, None)):
        backend = bench.backend(host, address=address, **settings)
        keys, others = hashes(LOOKUP_PAGES, "stored"), hashes(LOOKUP_PAGES, "others")
        assert all(backend.batch_set_v1(keys, bench.places(0, LOOKUP_PAGES), bench.at_root))
        hits, misses = [], []
        for _ in range(20 * rounds):
            hits.append(1e3 * lookup_seconds(backend, keys, LOOKUP_PAGES))
            misses.append(1e3 * lookup_seconds(backend, others, 0))
        for key, label, values in (("", "hits", hits), ("_misses", "misses", misses)):
            text = f"batch_exists of {LOOKUP_PAGES} pages, {label}{', with a salt' if settings else ''}"
            report.add(f"{name}{key}_ms", text, median(values), "ms", at_most=None if key else limit, samples=values)
        backend.close()


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    report = Report("bench_sglang")
    with (
        tempfile.TemporaryDirectory() as folder,
        tiercache.launch("256MiB", region="128MiB") as small,
        tiercache.launch(f"{(rounds + 4) * BATCH_PAGES}MiB", region="128MiB") as large,
    ):
        bench = Bench(Path(folder))  # meanwhile the daemons allocate their arenas
        for daemon in (small, large):
            await_arena(daemon.address)
        add_lookups(report, bench, small.address, rounds)
        add_transfers(report, bench, large.address, rounds)
    report.finish()


if __name__ == "__main__":
    main()
