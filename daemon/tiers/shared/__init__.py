"""The shared tier: blocks in a store that several hosts use, such as Valkey, an object store or a shared folder.

    match    ► presence: what the store was found to have ◄─ lookups ─ search ─► probes
    promote  ► fetches: store ► proved ► frame
    publish  ► writes: frame ► value ► store, behind
    flush    ► flushes ► notes in the store ► epochs ► other names for everything

A *value* is a block, or a pack of blocks, as the store keeps it. A *note* is a small random value, replaced by a flush;
three notes make an *epoch*, which is part of the name of every block. A *claim* is what a look-up found in the store,
believed for a short time. A *line* is a thread with a connection to the store.

tier         puts these together; what the rest of the daemon sees
access       the store as these see it: whether it may be asked, jobs for it, and what those tell
naming       names of blocks and notes           epochs     notes as last read, and what follows from them
value        the form of a block in the store    presence   what is believed to be in the store, for a short time
lookups      how far the store extends a prompt, and what this host has of windows (LocalWindows)
search       which blocks to probe for that
fetches      blocks from the store               writes     which blocks go to the store, and when
write_job    values on their way to the store    byte_rate  a limit on bytes in a second
flushes      notes that the store has yet to replace      ancestry   where a block stands in its chain
lines        threads with a connection each
breaker      whether to ask the store at all     memory     frames and scratch space as bytes
settings     the daemon's settings, ready for use
stores/      the kinds of stores
"""
