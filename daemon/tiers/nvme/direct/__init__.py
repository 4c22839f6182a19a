"""Direct access: disks that clients read and write themselves, under leases.

extents   blocks that stay in place while a client reads them
grants    slots that a client writes, and commits; `dram/store_leases` keeps those that it may still write to
"""
