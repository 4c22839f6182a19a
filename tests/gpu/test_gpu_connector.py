"""A connector whose pool is on a real device, over a real daemon: bytes, order, and trouble."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("msgspec")
pytest.importorskip("zmq")
pytest.importorskip("xxhash")

import torch
from block_copy_cases import GUARD
from connector_cases import ARENA, REGION, Client, check_store_and_load, keys
from copier_cases import POOLS, WAIT_S
from waiting import wait_until

import tiercache
from tiercache.copies.cuda import CudaCopier
from tiercache.copies.host_memory import process_memory

pytestmark = pytest.mark.gpu

FORMS = ["block-first, 64 KiB", "layer-first, 4 KiB pieces", "block-first, 1 KiB"]
"""Copied directly, by way of staging memory, and by kernels over the bus."""
ALL = list(range(24))


@pytest.fixture
def daemon() -> Iterator[tiercache.LaunchedDaemon]:
    with tiercache.launch(ARENA, region=REGION) as launched:
        yield launched


@pytest.mark.parametrize("map_arena", [True, False])
@pytest.mark.parametrize("form", POOLS)
def test_blocks_go_from_pool_to_pool(form: str, map_arena: bool, device: str, daemon: tiercache.LaunchedDaemon) -> None:
    check_store_and_load(daemon.address, form, device, map_arena=map_arena)
    wait_until(lambda: not len(process_memory.registered.starts))


def copier_of(connector: tiercache.Connector) -> CudaCopier:
    """What knows whether copies are under way."""
    copier = connector._own_mover().copier._copier  # rule: nothing public tells a submitted copy from a queued one
    assert isinstance(copier, CudaCopier)
    return copier


def keep_busy(device: str) -> None:
    """About a second of work on the current stream."""
    torch.cuda._sleep(int(2e9))


@pytest.mark.parametrize("form", FORMS)
def test_a_store_carries_what_kernels_before_it_write(form: str, device: str, daemon: tiercache.LaunchedDaemon) -> None:
    client = Client(daemon.address, form, device)
    with client.connector as connector:
        client.await_registration()
        compute = torch.cuda.Stream(device)
        compute.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(compute):
            keep_busy(device)
            client.spoil()
            transfer = connector.store_async(keys("store order", 24), ALL)
            assert not transfer.done()  # the blocks belong to the transfer meanwhile
        assert transfer.result(WAIT_S).stored == 24
        for layer in client.layers:
            layer.zero_()
        assert connector.load(connector.match(keys("store order", 24)), ALL) == 24
        assert bool((client.bytes(ALL) == GUARD).all())


@pytest.mark.parametrize("form", FORMS)
def test_a_load_comes_after_the_kernels_before_it(form: str, device: str, daemon: tiercache.LaunchedDaemon) -> None:
    """What still runs may read the blocks' old content, or write it."""
    client = Client(daemon.address, form, device)
    with client.connector as connector:
        client.await_registration()
        expected = client.bytes(ALL)
        chain = keys("load order", 24)
        assert connector.store(chain, ALL).stored == 24
        compute = torch.cuda.Stream(device)
        with torch.cuda.stream(compute):
            keep_busy(device)
            client.spoil()
            transfer = connector.load_async(connector.match(chain), ALL)
            assert not transfer.done()
        assert transfer.result(WAIT_S) == 24
        # Work that is queued from here on, on any stream, sees the blocks.
        assert torch.equal(client.bytes(ALL), expected)


def test_a_cancelled_load_keeps_its_blocks_until_its_copies_have_ended(
    device: str, daemon: tiercache.LaunchedDaemon
) -> None:
    client = Client(daemon.address, FORMS[0], device)
    with client.connector as connector:
        chain = keys("cancel", 24)
        assert connector.store(chain, ALL).stored == 24
        busy = torch.cuda.Stream(device)
        with torch.cuda.stream(busy):
            keep_busy(device)
            end = torch.cuda.Event()
            end.record(busy)
            transfer = connector.load_async(connector.match(chain), ALL)
        copier = copier_of(connector)
        wait_until(lambda: not copier.idle() or transfer.done())  # submitted, behind the work
        transfer.cancel()
        wait_until(transfer.done)
        assert end.query()  # the copies could not begin before, and they are over
        assert copier.idle()


def test_a_daemon_that_dies_takes_no_copy_along(device: str, daemon: tiercache.LaunchedDaemon) -> None:
    """The arena stays mapped and registered until the copy is over; the next calls are misses."""
    client = Client(daemon.address, FORMS[0], device)
    with client.connector as connector:
        client.await_registration()
        keep_busy(device)
        transfer = connector.store_async(keys("death", 24), ALL)
        copier = copier_of(connector)
        wait_until(lambda: not copier.idle() or transfer.done())
        os.kill(daemon.pid, signal.SIGKILL)
        result = transfer.result(WAIT_S)
        assert result.stored + result.dropped == 24
        assert copier.idle()
        wait_until(lambda: not connector.available)
        assert connector.load(connector.match(keys("death", 24)), ALL) == 0
        wait_until(lambda: not len(process_memory.registered.starts))
    assert float(torch.ones(8, device=device).sum()) == 8.0
