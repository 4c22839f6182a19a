"""Which blocks are here, where, and after which. One index for each tier; all of it is memory, on the event loop.

    index        entries in columns: key, parent, children, frame, pins. A block goes only after all that follow it.
      ├ allocator     frames: which part of the arena belongs to which size
      ├ policy        the interface: which leaf goes first. `policies/` has the policies.
      ├ chain_ends    ends of stores that are about to go on, kept for a moment
      ├ walks         walks up long chains, in slices
      └ check, frame_check    does all of this agree with itself

A frame is freed here and nowhere else: `Index.evict` and `Index.drop`, once nothing pins the entry.
"""
