"""The block index of each tier: which blocks are here, where, and after which. In memory, on the event loop.

    index        entries in columns: key, parent, children, frame, pins. A block is evicted after all that follow it.
      ├ allocator     frames: which part of the arena belongs to which size
      ├ policy        the interface: which leaf goes first. `policies/` has the policies.
      ├ chain_ends    ends of stores that are about to continue, kept for a moment
      ├ walks         walks up long chains, in slices
      └ check, frame_check    whether all of this is consistent

Frames are freed here and nowhere else: by `Index.evict` and `Index.drop`, once nothing pins the entry.
"""
