"""The catalog: the durable index of a directory, which tells what block each slot holds. SQLite, on its own thread.

    catalog ──► writer      the thread: collects changes, commits them, tries again when the disk refuses
                  └──► changes     what is written
            ──► database    the file: its tables, and when it is rejected
            ──► rows        one row, packed, with a checksum
    catalog_check           the same file, read without a daemon

A row is written after its block is on the disk, and deleted before its slot is used again.
"""
