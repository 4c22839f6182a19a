"""Faults while a GPU copies: no byte may ever be wrong, whoever dies.

A frame that a dead client was copying into may only be given to others when that client's copies are over for certain.
Whether the driver ends them before the daemon hears of the process's end only a GPU can show.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from gpu.place import DEVICE, MIB, REHEARSAL, ROOT, helper_folders, sized, synchronize
from gpu.tell import Skip, checking, fact, left_s, need

BLOCK = 2 * MIB
BLOCKS = sized(192, 16)
ARENA = (BLOCKS + BLOCKS // 4) * BLOCK
ROUNDS = 3
WATCH_S = sized(2, 1)
WAIT_S = 20.0
POOL_ROOM = 6 * MIB
CHILD_BYTE, OWN_BYTE = 0xEE, 0x11


def run(arguments: Sequence[str]) -> None:
    """Each fault; `client ADDRESS` is the process that is killed."""
    helper_folders("kernels")
    if arguments:
        client(arguments[1])
        return
    with checking("the daemon is killed while blocks are copied to it"):
        daemon_killed(load=False)
    with checking("the daemon is killed while blocks are copied from it"):
        daemon_killed(load=True)
    for number in range(ROUNDS):
        with checking(f"a client is killed while the device copies into the arena, {number + 1}"):
            need(8)
            client_killed(number)
    with checking("a connector is closed while its copies wait for the device"):
        need(6)
        late_copies()
    with checking("no device memory for staging"):
        no_memory(at_copy=False)
    with checking("no device memory for a copy"):
        no_memory(at_copy=True)


class Client:
    """A connector with a pool on the device, all of whose bytes are `byte`."""

    def __init__(self, address: Any, byte: int, blocks: int = BLOCKS) -> None:
        import torch

        import tiercache

        self.pool = torch.full((blocks, BLOCK), byte, dtype=torch.uint8, device=DEVICE)
        spec = tiercache.NamespaceSpec(
            engine="test/1", layout="faults", dtype="bfloat16", block_size=4, block_bytes=BLOCK
        )
        pool = tiercache.Pool.from_blocks(self.pool)
        self.connector = tiercache.connect(address, namespace=spec, pool=pool, required=True, request_timeout_s=10.0)
        self.ids = list(range(blocks))

    def await_arena(self) -> None:
        arena = self.connector.client.session().arena
        deadline = time.monotonic() + WAIT_S
        while arena is not None and (arena._populating or arena.registration == "none"):
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        fact("the arena is held by", arena.registration if arena else "none")


def chain(name: str, blocks: int = BLOCKS) -> bytes:
    import tiercache

    return tiercache.KeyChain(tiercache.root_key(name), 4, range(blocks * 4)).packed()


def works() -> None:
    """The device still computes."""
    import torch

    assert float(torch.ones(8, device=DEVICE).sum()) == 8.0
    synchronize()


def daemon_killed(*, load: bool) -> None:
    """At another moment in each round: whatever was said to be there is there, and right."""
    import tiercache
    from tiercache.copies.host_memory import process_memory

    for number in range(ROUNDS):
        need(6)
        with tiercache.launch(ARENA) as daemon:
            here = Client(daemon.address, OWN_BYTE)
            with here.connector as connector:
                here.await_arena()
                keys = chain(f"killed {number}")
                if load:
                    assert connector.store(keys, here.ids).stored == BLOCKS
                    here.pool.fill_(CHILD_BYTE)
                    transfer: Any = connector.load_async(connector.match(keys), here.ids)
                else:
                    transfer = connector.store_async(keys, here.ids)
                time.sleep(0.002 * number)
                os.kill(daemon.pid, signal.SIGKILL)
                result = transfer.result(WAIT_S)
                synchronize()
                if load:
                    assert bool((here.pool[:result] == OWN_BYTE).all()), "a loaded block is wrong"
                else:
                    assert result.stored + result.dropped == BLOCKS, str(result)
                    assert bool((here.pool == OWN_BYTE).all()), "a store has changed the pool"
                while connector.available:
                    time.sleep(0.005)
                assert connector.load(connector.match(keys), here.ids) == 0
            deadline = time.monotonic() + WAIT_S
            while len(process_memory.registered.starts):
                assert time.monotonic() < deadline, "memory of a dead daemon stays registered"
                time.sleep(0.01)
            works()


def client(address: str) -> None:
    """Store without end, until killed."""
    here = Client(address, CHILD_BYTE)
    here.await_arena()
    number = 0
    print("copying", flush=True)
    while True:
        transfers = [here.connector.store_async(chain(f"child {number} {part}"), here.ids) for part in range(2)]
        for transfer in transfers:
            transfer.result(WAIT_S)
        number += 1


def client_killed(number: int) -> None:
    """Then another client takes every frame that it can get, and watches its bytes."""
    import tiercache

    with tiercache.launch(ARENA) as daemon:
        here = Client(daemon.address, OWN_BYTE)
        with here.connector:
            here.await_arena()
            command = [sys.executable, str(ROOT / "bench" / "gpu_check.py"), "--part", "faults", "client"]
            child = subprocess.Popen([*command, str(daemon.address)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
            try:
                assert child.stdout is not None
                while (line := child.stdout.readline()) and line.strip() != "copying":
                    pass
                assert line, "the client ended"
                time.sleep(0.2 + 0.013 * number)
            finally:
                child.kill()
            watch(here, f"after the client {number}")
            child.wait(WAIT_S)
            watch(here, f"again {number}")
        works()


def watch(here: Client, name: str) -> None:
    """Store all of the pool as soon as frames are free, and read it back again and again."""
    keys = chain(name)
    connector, stored = here.connector, 0
    until = time.monotonic() + WATCH_S
    while stored < BLOCKS // 2 and time.monotonic() < until + WAIT_S:
        here.pool.fill_(OWN_BYTE)
        synchronize()
        connector.store(keys, here.ids)
        stored = connector.match(keys).blocks
    assert stored, "nothing could be stored after the client's death"
    rounds = 0
    while time.monotonic() < until and left_s() > 5:
        here.pool.zero_()
        loaded = connector.load(connector.match(keys), here.ids)
        synchronize()
        assert bool((here.pool[:loaded] == OWN_BYTE).all()), f"wrong bytes in a block, round {rounds}"
        rounds += 1
    fact(f"{name}: blocks, rounds", [stored, rounds])


def late_copies() -> None:
    """Copies that the device begins after their connector was closed harm nobody."""
    import torch

    import tiercache

    with tiercache.launch(ARENA) as daemon:
        late, other = Client(daemon.address, CHILD_BYTE), Client(daemon.address, OWN_BYTE)
        for one in (late, other):
            one.await_arena()
        if not REHEARSAL:
            torch.cuda._sleep(int(2e9))  # about a second
        transfer = late.connector.store_async(chain("late"), late.ids)
        late.connector.close()
        try:
            fact("the store of a closed connector", str(transfer.result(WAIT_S)))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            fact("the store of a closed connector", f"{type(error).__name__}: {error}")
        stream = None if REHEARSAL else torch.cuda.Stream()
        with torch.cuda.stream(stream) if stream is not None else torch.no_grad(), other.connector:
            watch(other, "beside late copies")
    works()


def no_memory(*, at_copy: bool) -> None:
    """A full device: blocks are copied another way or not at all, and what is said to be there is right."""
    if REHEARSAL:
        raise Skip("a rehearsal has no device memory to fill")
    import torch
    from connector_cases import Client as Small
    from connector_cases import keys

    import tiercache

    form = "layer-first, 4 KiB pieces"
    with tiercache.launch("64MiB", region="16MiB") as daemon:
        torch.cuda.empty_cache()
        hog: list[Any] = []
        try:
            if not at_copy:
                hog, spared = fill(), 0
                while hog and spared < POOL_ROOM:  # room for the pool, and none for its staging memory
                    spared += hog.pop().numel()
            here = Small(daemon.address, form, DEVICE)
            with here.connector as connector:
                try:
                    here.await_registration()
                except AssertionError:
                    fact("on a full device", "the arena could not be registered")
                expected = here.bytes(list(range(24)))
                if at_copy:
                    hog = fill()
                result = connector.store_async(keys("full", 24), list(range(24))).result(WAIT_S)
                fact(f"a store on a full device ({'copy' if at_copy else 'staging'})", str(result))
                assert result.stored + result.dropped == 24
                hog.clear()
                torch.cuda.empty_cache()
                here.spoil()
                loaded = connector.load(connector.match(keys("full", 24)), list(range(24)))
                assert loaded == result.stored, f"{loaded} of {result.stored} blocks came back"
                assert torch.equal(here.bytes(list(range(24)))[:loaded], expected[:loaded]), "wrong bytes"
                again = connector.store(keys("after", 24), list(range(24)))
                assert again.stored == 24, f"with memory again: {again}"
        finally:
            hog.clear()
            torch.cuda.empty_cache()
    works()


def fill() -> list[Any]:
    """Take the device's memory down to the last piece that can be had."""
    import torch

    taken: list[Any] = []
    size = 1 << 34
    while size >= 4096:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device=DEVICE))
        except torch.OutOfMemoryError:
            size //= 2
    return taken
