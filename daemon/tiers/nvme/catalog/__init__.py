"""The durable index of a directory: which slot holds which block. SQLite, on a thread of its own.

    catalog ──► database    the file: its tables, and when it is not believed
            ──► rows        one row, packed, with a checksum
    closing     closing a database whose path may lead elsewhere by now
    catalog_check           the same file, without a daemon

A row is written after its block is on the disk, and deleted before its slot is used again.
"""
