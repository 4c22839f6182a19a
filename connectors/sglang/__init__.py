"""The parts of the SGLang connector. SGLang loads `sglang_hicache`, one folder up, in each of its schedulers.

version    which versions of SGLang are served
pools      SGLang's host memory as pools of blocks, and the form of these
names      what pages are called, and that this changes with the weights
settings   what can be configured
engine     what SGLang's functions that make a storage backend know and do not pass on
"""
