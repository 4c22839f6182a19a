"""The files of one directory, and what reads and writes them.

    directory ── superblock, lock, segment_files, aside (damaged files), aio_probe
    queue ── backlog: what waits ──► carriers: aio ─────► kernel_aio: transfers under way
                                           or threads ─► disk: system calls
             both by way of block_io: operations, forms of a block
    health    is the disk written to           troubles    an error in words, with its remedy
    tally     counts and times of operations

Threads here never touch the daemon's state: they hand results to the event loop.
"""
