"""The DRAM tier: blocks in the arena.

    space        namespaces, size classes, and room: eviction to make more of it
    reads        match, resolve, pin: blocks that stay in place under a lease
      ├ match_ends    where a match may end, over both tiers
      └ growing       leases that wait for blocks of the tier below
    writes       reserve, commit, abort; `tiers/quarantine` keeps frames that a client may still write to
      ├ pending_blocks    reserved blocks, until they are visible or dropped
      └ write_lease       a store and its blocks, as data
    leases       leases and their owners, as data
    region_shares    whole regions that tenants take, and which of them they give back
    check        whether all of it is consistent

`space` frees a frame when its entry has left the index and the last pin is gone, `writes` one that was never published.
"""
