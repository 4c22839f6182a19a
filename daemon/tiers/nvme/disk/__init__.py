"""The files of one directory, and the threads that read and write them.

    directory ── superblock, lock, segment_files, aside (damaged files)
    queue     I/O threads ──► block_io: one run of blocks ──► forms ──► disk: system calls
    health    is the disk written to           troubles    an error in words, with its remedy
    mounts    is the file system mounted

Threads here never touch the daemon's state: they hand results to the event loop.
"""
