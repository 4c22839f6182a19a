"""Moves of blocks between DRAM and NVMe.

writebehind   new blocks to disk, parents first        ◄── offers: used in DRAM and missing below
promotion     blocks from disk into frames, in order, published as if a client had stored them
budget        limit on the bytes written per day
dirty         blocks that only DRAM has, written before the daemon ends
"""
