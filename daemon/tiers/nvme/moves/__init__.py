"""Moves of blocks between DRAM and NVMe, and what leaves NVMe.

writebehind   new blocks to disk, parents first, by the run    ◄── offers: used in DRAM and missing below
flights       its writes in progress, until their blocks are visible
shelf_source  which directory has a block; reads it into a frame, for promotion
budget        limit on the bytes written per day
placement     which directory a chain lives in
fairness      whose blocks are evicted
flushes       each is answered when every directory has it
"""
