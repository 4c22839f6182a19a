"""Checks that search for damage.

directory_check   a directory without its daemon: compares the index with the disk
    findings                        what it reports
scan              reads blocks only to verify their checksums, while the daemon serves
"""
