"""Copies under real vLLM whose blocks, daemon or process go away while they are under way.

A copy waits in the engine's process, in the thread that does it, until the test lets it go on; the daemon is real.
README.md in this folder says which fault each of these is.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_engines import Engine, flush, launch, prompt, statistics, stored_blocks, wait_until

import tiercache
from tiercache.protocol.messages import Check

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
Start = Callable[..., Engine]


class Held:
    """The next copy of an engine's first KV cache group. It waits until the test lets it go on."""

    def __init__(self, engine: Engine, folder: Path, way: str, damage: bool = False) -> None:
        self.folder = folder
        folder.mkdir()
        wait_until(lambda: engine.generate([[5, 6, 7]]) and engine.ask("check")["jobs"] == 0)  # no other store
        assert engine.ask("hold", way=way, folder=str(folder), damage=damage)["done"]

    def await_copy(self) -> None:
        wait_until(lambda: any(self.folder.iterdir()))

    def let_go(self) -> None:
        (self.folder / "go").touch()


def findings(daemon: tiercache.LaunchedDaemon) -> list[str]:
    """The findings of the daemon's own check."""
    with tiercache.Client.connect(daemon.address, map_arena=False) as client:
        return list(client.session().call(Check, tiercache.protocol.messages.CheckReply).findings)


def test_a_load_that_the_daemon_does_not_confirm_is_computed(
    engine: Engine, daemon: tiercache.LaunchedDaemon, tmp_path: Path
) -> None:
    """The blocks are lost in mid copy, and what is copied is not what they were."""
    long = prompt(640, "not confirmed")
    expected = engine.generate([long])[0]
    wait_until(lambda: stored_blocks(daemon) == 20)
    engine.forget()
    held = Held(engine, tmp_path / "load", "in", damage=True)
    engine.order_generate([long])
    held.await_copy()
    flush(daemon)
    held.let_go()
    assert engine.outputs() == (expected, [0])
    assert engine.generate([long])[0] == expected, "nothing else is in vLLM's own prefix cache"
    wait_until(lambda: stored_blocks(daemon) == 20)
    held = Held(engine, tmp_path / "good", "in", damage=True)
    engine.forget()
    engine.order_generate([long])
    held.await_copy()
    held.let_go()
    assert engine.outputs()[0] != expected, "with the daemon's word the same bytes are used"
    engine.forget()


def test_stopped_and_killed_while_it_copies(start: Start, plain: Engine, tmp_path: Path) -> None:
    stored, more = prompt(640, "is stored"), prompt(640, "is being stored")
    expected = plain.generate([stored, more])[0]
    with launch("16MiB", region="8MiB", lease_ttl_max="1s") as daemon:
        engine = start(daemon.address)
        engine.await_hits(stored)

        def stopped(held: Held, until: Callable[[dict[str, int]], object]) -> None:
            """The engine stands still in its copy until the daemon says so of its leases."""
            held.await_copy()
            os.kill(engine.pid, signal.SIGSTOP)
            wait_until(lambda: until(statistics(daemon)["leases"]))

        def go_on(held: Held) -> list[list[int]]:
            os.kill(engine.pid, signal.SIGCONT)
            held.let_go()
            return engine.outputs()[0]

        # A load whose lease has ended meanwhile, with others' bytes in what it reads.
        engine.forget()
        held = Held(engine, tmp_path / "load", "in", damage=True)
        engine.order_generate([stored])
        stopped(held, lambda leases: not leases["read"])
        flush(daemon)
        assert go_on(held) == expected[:1]

        # A store whose lease has ended: no other client gets its frames until it says that it has copied.
        held = Held(engine, tmp_path / "store", "out")
        engine.order_generate([more])
        stopped(held, lambda leases: leases["quarantined"])
        assert statistics(daemon)["arena"]["quarantined_bytes"] == 16 * 65536  # of the first step
        assert go_on(held) == expected[1:]
        wait_until(lambda: not statistics(daemon)["arena"]["quarantined_bytes"])
        wait_until(lambda: engine.regenerate([more])[1] == [640])
        assert engine.regenerate([stored, more])[0] == expected

        # And now it does not come back, but a child of it has all that it had open.
        flush(daemon)
        left = int(engine.ask("fork")["pid"])
        held = Held(engine, tmp_path / "last", "out")
        engine.forget()
        engine.order_generate([stored])
        stopped(held, lambda leases: leases["quarantined"])
        os.kill(engine.pid, signal.SIGKILL)
        try:
            wait_until(lambda: not statistics(daemon)["leases"]["quarantined"])
            wait_until(lambda: all("vllm" not in session["name"] for session in statistics(daemon)["sessions"]))
        finally:
            os.kill(left, signal.SIGKILL)  # which fails if it has not lived until here
        assert statistics(daemon)["arena"]["quarantined_bytes"] == 0
        assert stored_blocks(daemon) == 0, "no half-stored block is visible"
        assert findings(daemon) == []
