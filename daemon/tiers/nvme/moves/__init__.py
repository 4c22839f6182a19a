"""Moves of blocks between DRAM and NVMe.

writebehind   new blocks to disk, parents first        ◄── offers: used in DRAM and missing below
shelf_source  which directory has a block; reads it into a frame, for promotion
budget        limit on the bytes written per day
dirty         blocks that only DRAM has, written before the daemon ends
"""
