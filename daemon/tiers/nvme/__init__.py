"""The NVMe tier: blocks on local disks, one directory per disk.

tier          puts the rooms together, for the event loop
inspection    what operators see: single blocks, and figures

From the highest floor to the lowest; each imports from those below it:

opening/  a directory while the daemon runs      direct/   disks that clients read and write themselves
moves/    DRAM to NVMe and back, and flushes     worker/   a directory in a process of its own
check/    searches for damage
shelf/    one open directory: index and slots
catalog/  the durable index, in SQLite
disk/     files, system calls, I/O threads
"""
