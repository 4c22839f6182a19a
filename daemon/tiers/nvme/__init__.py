"""The NVMe tier: blocks on local disks, one directory per disk.

tier ──► keeper     a directory during the daemon's life: opened (opening), given up, opened again;
                    left alone while it hangs (`Shelf.offline`); `Keepers`: those of all directories
     ──► shelf      one open directory: its index, its slots, rows from before the restart (recovery, registry)
     ──► placement, fairness    which directory a chain lives in; whose blocks are evicted
     ──► flushes    each is answered when every directory has it
inspection          what operators see: single blocks, and figures

moves/    DRAM to NVMe and back          direct/    disks that clients read and write themselves
catalog/  the durable index, in SQLite   disk/      files, system calls, I/O threads
check/    searches for damage
"""
