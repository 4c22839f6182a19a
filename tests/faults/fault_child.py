"""The child's side of `fault_processes.Child`: a client that obeys orders from its stdin.

    peer    a hand-made client (`fault_peer.Peer`) with all that it must not do
    engine  a connector with a pool, as an engine has it

Every order is one JSON line `[name, arguments]`; every answer is one line `{"value": ...}`, or
`{"error": ...}` when the order failed or bytes were wrong.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from typing import Any

from chains import chain_of, key_of
from fault_engine import Engine, content, spec_of
from fault_peer import Peer

from tiercache.protocol import messages as m

LIFE_S = 120
MORE_S = 20


class PeerChild:
    """Orders for a hand-made client. Block content is always the right one, unless told to scribble."""

    def __init__(self, run_dir: str, block_bytes: int) -> None:
        self.spec = spec_of(block_bytes)
        self.peer = Peer(run_dir)

    def reserve(self, seed: object, blocks: int, ttl_ms: int) -> list[int]:
        self.keys = chain_of(seed, blocks)
        reserved = self.peer.reserve_chain(self.spec, self.keys, ttl_ms=ttl_ms)
        self.lease = reserved.lease
        self.indices = [index for index, state in enumerate(reserved.states) if state == m.BlockState.FRAME]
        self.frames = list(m.unpack_frames(reserved.frames))
        return self.frames

    def fill(self, count: int) -> int:
        for index, frame in list(zip(self.indices, self.frames, strict=True))[:count]:
            self.peer.write(frame, content(key_of(self.keys, index), self.spec))
        return count

    def scribble(self) -> int:
        """Write to every frame of the last reservation, however late it is."""
        for frame in self.frames:
            self.peer.write(frame, b"\xee" * self.spec.block_bytes)
        return len(self.frames)

    def commit(self) -> list[int]:
        return self.peer.commit(self.lease, self.indices)

    def hang_up(self) -> bool:
        self.peer.hang_up()
        return True

    def fork(self) -> int:
        """A child that inherits every socket and does nothing, for two minutes at most."""
        pid = os.fork()
        if pid == 0:
            signal.alarm(LIFE_S)
            os.close(0)
            os.close(1)
            while True:
                signal.pause()
        return pid


class EngineChild:
    """Orders for a connector with a pool."""

    def __init__(self, run_dir: str, block_bytes: int, blocks: int = 64, **settings: Any) -> None:
        self.engine = Engine(run_dir, spec_of(block_bytes), blocks, **settings)

    def store(self, seed: object, blocks: int) -> list[int]:
        return list(self.engine.store(chain_of(seed, blocks)))

    def load(self, seed: object, blocks: int) -> int:
        return self.engine.load(chain_of(seed, blocks))

    def hold(self, seed: object, blocks: int) -> int:
        self.match = self.engine.connector.match(chain_of(seed, blocks))
        return self.match.blocks

    def load_held(self, seed: object) -> int:
        return self.engine.load_match(self.match, chain_of(seed, self.match.blocks))

    def churn(self, seed: int, seconds: float, chains: int, longest: int, flush: bool) -> dict[str, int]:
        """Store, load, pin and flush at random, with every good block verified."""
        dice = random.Random(seed)
        engine, connector = self.engine, self.engine.connector
        totals = dict.fromkeys(("rounds", "stored", "good", "misses"), 0)
        end_s = time.monotonic() + seconds
        last_s = end_s + MORE_S
        # On a busy machine there may be no hit in that time.
        while (now_s := time.monotonic()) < end_s or (now_s < last_s and not (totals["stored"] and totals["good"])):
            totals["rounds"] += 1
            keys = chain_of(f"churn {dice.randrange(chains)}", dice.randint(1, longest))
            draw = dice.random()
            if draw < 0.45:
                totals["stored"] += engine.store(keys).stored
            elif draw < 0.93:
                good = engine.load(keys)
                totals["good"] += good
                totals["misses"] += good == 0
            elif draw < 0.96:
                connector.pin(keys, ttl_s=0.2)
            elif draw < 0.97:
                connector.unpin(keys)
            elif draw < 0.98:
                connector.release(connector.match(keys))
            elif flush:
                engine.try_flush(key=b"" if draw > 0.995 else key_of(keys, 0))
        return totals


def main() -> None:
    kind, run_dir, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    signal.alarm(LIFE_S)
    target: Any = None
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            if name == "begin":
                target = {"peer": PeerChild, "engine": EngineChild}[kind](run_dir, **settings)
                answer: dict[str, Any] = {"value": os.getpid()}
            else:
                answer = {"value": getattr(target, name)(**arguments)}
        except Exception:  # noqa: BLE001 - whatever it was is the answer, and the test decides
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
