"""Makes the pictures of the dashboard in daemon/pictures: real blocks of made-up chats, and a real Chromium.

    .venv/bin/python bench/dashboard_picture.py [SECONDS]

Forty users at a time talk below three system prompts, on a daemon whose DRAM holds a part of it and whose NVMe more.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np
from bench_http import url_in
from chromium import Browser
from common import ROOT, SEED

import tiercache

PICTURES = ROOT / "daemon" / "pictures"
SIZE = 1200, 900
MOST_BYTES = 200_000
BLOCK = 16
BLOCK_BYTES = 256 << 10
USERS = 40
LONGEST = 200 * BLOCK
PAUSE_S = 0.06
SPEC = tiercache.NamespaceSpec(
    engine="chats/1",
    layout="layer,2,slot,kv_head,head_dim",
    dtype="bfloat16",
    block_size=BLOCK,
    block_bytes=BLOCK_BYTES,
)


class Chats:
    """Users who send their whole conversation again with each turn, as chats do."""

    def __init__(self, connector: tiercache.Connector) -> None:
        self._connector = connector
        self._random = random.Random(SEED)
        self._systems = [[self._token() for _ in range(BLOCK * blocks)] for blocks in (40, 24, 12)]
        self._users: list[list[int]] = []

    def _token(self) -> int:
        return self._random.randrange(1 << 17)

    def _tokens(self, blocks: int) -> list[int]:
        return [self._token() for _ in range(BLOCK * blocks)]

    def turn(self) -> None:
        """One user's turn: look up, load, store what is new."""
        if len(self._users) < USERS or self._random.random() < 0.05:
            system = self._random.choices(self._systems, (6, 3, 1))[0]
            self._users.append([*system, *self._tokens(self._random.randrange(2, 8))])
        chat = self._random.choice(self._users[-USERS:])
        keys = tiercache.KeyChain(bytes(16), BLOCK, chat).packed()
        match = self._connector.match(keys)
        good = self._connector.load(match, range(match.blocks)) if match.blocks else 0
        if good < len(keys) // 16:
            self._connector.store(keys, range(len(keys) // 16))
        chat += self._tokens(self._random.randrange(1, 5))
        if len(chat) > LONGEST:
            self._users.remove(chat)


def main() -> None:
    seconds = float(sys.argv[1]) if sys.argv[1:] else 200.0
    PICTURES.mkdir(exist_ok=True)
    pool = tiercache.Pool.from_blocks(np.random.default_rng(SEED).integers(0, 256, (256, BLOCK_BYTES), np.uint8))
    with (
        tempfile.TemporaryDirectory() as folder,
        tiercache.launch(
            "128MiB",
            region="32MiB",
            run_dir="/tmp/tiercache-demo",
            nvme=Path(folder) / "nvme",
            nvme_size="1GiB",
            nvme_segment="64MiB",
            http="127.0.0.1:0",
            log=Path(folder) / "log",
        ) as daemon,
        tiercache.connect(daemon.address, namespace=SPEC, pool=pool, required=True, name="engine") as connector,
        closing(Browser()) as browser,
    ):
        chats = Chats(connector)
        browser.resize(*SIZE)
        browser.open(url_in(Path(folder) / "log"))
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            chats.turn()
            # Busier and calmer times, so that there is something to see.
            time.sleep(chats._random.expovariate(1 / PAUSE_S) * (0.4 if time.monotonic() % 80 < 30 else 1.0))
        for scheme in ("light", "dark"):
            browser.prefer(scheme)
            time.sleep(0.5)
            picture = browser.picture()
            if len(picture) > MOST_BYTES:
                raise RuntimeError(f"a picture of {len(picture)} bytes")
            (PICTURES / f"dashboard-{scheme}.png").write_bytes(picture)
            print(scheme, len(picture), "bytes")


if __name__ == "__main__":
    main()
