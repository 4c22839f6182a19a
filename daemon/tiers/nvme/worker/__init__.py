"""One NVMe directory in a process of its own: files, I/O, checksums, codecs, encryption and catalog.

    daemon: Shelf ─► remote_queue ────── blocks ───────► lines ───► DiskQueue ─► disk
                  ─► remote_catalog ──── rows ─────────► lines ───► Catalog ─► SQLite
                  ─► remote_directory ── files ────────► child ───► Directory
                        └ directory_worker: starts the process, and another one when it has ended

What the process runs are the very parts that the daemon runs itself without it. The loop keeps what decides: index,
policies, leases, free slots, priorities and how much is under way (credit). Frames are not copied: the process maps the
arena's regions.

A process that ends costs the reads that it had taken, which are misses; writes and rows that it has not confirmed are
sent to the next one. The end of file on a line proves that its I/O is over: the kernel closes a process's files after
it has waited for its system calls and its asynchronous I/O. Until then its frames and slots are not reused.

opening       opens a directory and its catalog, here or in the daemon
records       blocks on the line: 64 bytes each        messages      all else that is said
lines         packets in parts                         regions       the arena's memory in the process
"""
