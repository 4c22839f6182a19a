"""A process that stores one chain past DRAM; its first write hangs for ever, the others are done.

    python writing_child.py RUN_DIR CHAIN_NAME BLOCKS

Prints a line once the write hangs.
"""

from __future__ import annotations

import mmap
import sys

import numpy as np
from chains import chain_of, key_of
from cluster import BLOCK_BYTES, content
from waiting import wait_until

import tiercache
from tiercache.connector.direct.backend import Fault, HostBackend


def main(run_dir: str, name: str, blocks: int) -> None:
    """Begin the store, and stay in it."""
    chain = chain_of(name, blocks)
    pool = np.frombuffer(mmap.mmap(-1, blocks * BLOCK_BYTES), np.uint8).reshape(blocks, BLOCK_BYTES)
    for number in range(blocks):
        pool[blocks - 1 - number] = content(key_of(chain, number))
    backend = HostBackend(write_fault=lambda number: Fault.HANG if number == 0 else None)
    spec = tiercache.NamespaceSpec(
        engine="test/1", layout="bytes", dtype="uint8", block_size=1, block_bytes=BLOCK_BYTES
    )
    connector = tiercache.connect(
        run_dir,
        namespace=spec,
        pool=tiercache.Pool.from_blocks(pool),
        required=True,
        request_timeout_s=30.0,
        gds=backend,
        gds_store=True,
    )
    transfer = connector.store_async(chain, range(blocks)[::-1])
    wait_until(lambda: backend.hanging == 1 and backend.writes == blocks, "all other writes are done")
    print("it hangs", flush=True)
    transfer.result(600)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
