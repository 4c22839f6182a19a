"""The form of a block outside DRAM: compressed, encrypted, or as it is.

codecs    lossless compression
cipher    encryption, with a key of its own for each block
"""
