"""Damage, looked for.

    directory_check   a directory without its daemon: what the index says against what is on the disk
    scan              blocks read only to see whether their checksums hold, while the daemon serves
"""
