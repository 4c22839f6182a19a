"""The DRAM tier: blocks in the arena.

    space        namespaces, size classes, and room: eviction to make more of it
    reads        match and prefetch: blocks that stay in place under a lease
      ├ runs            finds what several namespaces have, and pins it (match_ends: where a match may end)
      ├ read_leases     frames, hold, release; leases expire, or end because they have lost a block
      ├ growing_leases  those that wait for blocks of the tier below (growing_run: for those of one namespace)
      └ pins            prefixes that clients pin
    writes       reserve, commit, abort
      ├ pending_blocks  reserved blocks, until they are visible or dropped
      ├ write_lease     a store and its blocks, as data
      ├ store_leases    who may write where, in DRAM and on NVMe, and how long a place is not reused
      └ unfinished      how much each client may have under such leases
    below        what DRAM asks of the tiers below it
      ├ promotion       blocks from there into frames, in order
      └ source          what promotion asks of a directory or a store
    leases       leases and their owners, as data
    quotas       how much of each tier a tenant may have
    check        whether all of it is consistent

The index frees a frame when its entry has gone and the last pin with it, `writes` and `pending_blocks` one that was
never published; in any case after the last reader or disk write that holds it.
"""
