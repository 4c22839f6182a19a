"""The block index of each tier: which blocks are here, where, and after which. In memory, on the event loop.

    index        the blocks of one tier: published, evicted after all that follow them, dropped
      ├ lookups       how much of a chain is here, and where
      ├ entries       rows in columns: key, parent, children, frame, pins
      ├ allocator     frames: which part of the arena belongs to which size
      ├ policy        the interface: which leaf goes first. `policies/` has the policies.
      ├ chain_ends    ends of stores that are about to continue, kept for a moment
      ├ walks         walks up long chains, in slices
      ├ ages          how long ago a recency stamp was given
      └ check, frame_check    whether all of this is consistent

Who frees a frame? Only `Allocator.give_back`, and only once nothing holds the frame any more (`Allocator.hold`: an
answer on its way to a client, a write to a disk). The index calls it when an entry is evicted or dropped and nothing
pins it; `dram/writes` and `dram/pending_blocks` for frames that were reserved and not published, after a quarantine if
a client may still write to them. An NVMe slot is free after its row is deleted (`nvme/shelf/slots`: LeftSlots).
"""
