"""Blocks between DRAM and NVMe.

    writebehind   new blocks to disk, parents first        ◄── offers: what was used in DRAM and is missing below
    promotion     blocks from disk into frames, in order, published as if a client had stored them
    budget        how much may be written in a day
    dirty         what only DRAM has, written before the daemon ends
"""
