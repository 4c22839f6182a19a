"""The catalog: the durable index of a directory, which tells what block each slot holds. SQLite, on its own thread.

    catalog ──► database    the file: its tables, and when it is rejected
            ──► rows        one row, packed, with a checksum
    closing     closes a database whose path may lead elsewhere by now
    catalog_check           the same file, read without a daemon

A row is written after its block is on the disk, and deleted before its slot is used again.
"""
