"""Replies: their common head, and those about blocks."""

from __future__ import annotations

import msgspec


class Reply(msgspec.Struct, array_like=True, tag="reply"):
    """Fields that every reply starts with."""

    request_id: int
    generation: int


class Done(Reply, tag="done"):
    """It was done, or had been done before."""


class Error(Reply, tag="error"):
    """Refused. `code` is an `ErrorCode` value; `text` says what to do."""

    code: str
    text: str


class Namespace(Reply, tag="namespace"):
    """The small integer of a registered spec, and the size of its frames."""

    namespace: int
    frame_bytes: int


class Matched(Reply, tag="matched"):
    """Blocks of the leading run found, by tier: in DRAM, then further ones in the tiers below.

    The last `shared_blocks` of those are in a store that hosts share: they come over the network.

    `frames` holds one packed list per namespace for as many blocks as `resolve` asked for.
    `extents`: the lease keeps the blocks below in place, and `Extents` says where.
    """

    dram_blocks: int
    below_blocks: int
    lease: int
    frames: list[bytes] = []
    extents: bool = False
    shared_blocks: int = 0


class Peeked(Reply, tag="peeked"):
    """Blocks of the leading run by tier: that of all namespaces, then `[dram, below]` of each one alone.

    The last `shared_blocks` of those below are in a store that hosts share; `each_shared`: the same of each namespace
    alone, in the order of `each`.
    """

    dram_blocks: int
    below_blocks: int
    each: list[tuple[int, int]]
    shared_blocks: int
    each_shared: list[int]


class Frames(Reply, tag="frames"):
    """Frames from block `first` on; fewer than asked when the run is shorter.

    `more`: further requested blocks are being promoted; ask again. Such a request is answered when at least one block
    is there, or after a fifth of a second.
    """

    first: int
    frames: bytes
    more: bool = False


class Released(Reply, tag="released"):
    """`good`: the lease was never revoked, so what was copied under it is right. Else a miss."""

    good: bool


class Renewed(Reply, tag="renewed"):
    """One byte per lease: 1 alive with the new deadline, 0 over."""

    alive: bytes


class Reserved(Reply, tag="reserved"):
    """One `BlockState` byte per key, and the frames of those in state FRAME, in order.

    `parent_missing`: the block before the first key is not here, so nothing was reserved; send
    an earlier part of the chain.
    """

    lease: int
    states: bytes
    frames: bytes
    parent_missing: bool = False


class Committed(Reply, tag="committed"):
    """One `CommitState` byte per index, in the order asked."""

    states: bytes


class Payload(Reply, tag="payload"):
    """The bytes follow as the next ZeroMQ frame."""

    length: int


class Pinned(Reply, tag="pinned"):
    """Blocks of the prefix that are (or were) pinned."""

    blocks: int


class Hinted(Reply, tag="hinted"):
    """Blocks of the prefix that are here, in any tier: 0 if the hint had no effect."""

    blocks: int


class ExtentList(Reply, tag="extent_list"):
    """Extents from block `first` on, EXTENT_BYTES each; fewer than asked where a block has none.

    A block has none when it is not on NVMe, or stored in a form that a client cannot verify on a GPU.
    `directories` are paths; an extent names one by its place, and the file in it is
    `segments/<8 digits of the segment>.seg`.
    """

    first: int
    directories: list[str]
    extents: bytes


class ReservedExtents(Reply, tag="reserved_extents"):
    """How many leading keys are on NVMe, and places for a run of those that follow, EXTENT_BYTES each.

    Fewer than asked is backpressure; no place at all comes with lease NO_LEASE. `soon`: places are being made, or
    another client is writing the next block now, so ask again. A place's checksum is 0.
    """

    lease: int
    present: int
    directory: str
    extents: bytes
    soon: bool = False
