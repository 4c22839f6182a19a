"""Disks that clients read and write themselves, under leases.

    extents   blocks that stay where they are while a client reads them
    grants    slots that a client writes, and commits
"""
