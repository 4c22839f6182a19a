"""Checks that search for damage.

directory_check   a directory without its daemon: compares the index with the disk
    tables, chains, block_reader    its three parts: what a row must agree with, what it hangs on, its bytes
    findings                        what it reports
scan              reads blocks only to verify their checksums, while the daemon serves
"""
