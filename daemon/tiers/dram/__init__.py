"""The DRAM tier: blocks in the arena.

    space        namespaces, size classes, and room: eviction to make more of it
    reads        match, resolve, pin: blocks that stay in place under a lease
      ├ match_ends    where a match may end, over both tiers
      └ growing       leases that wait for blocks of the tier below
    writes       reserve, commit, abort; the quarantine of frames that a client may still write to
      └ unfinished    how much of the arena unfinished stores may take
    leases       leases and pending blocks, as data
    check        whether all of it is consistent

`space` frees frames through the index, after the last pin on them is gone.
"""
