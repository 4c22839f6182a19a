"""`tiercache bench`: measurements on this machine.

command ──► codecs   blocks of files or made-up ones, encoded and decoded: ratio and speed
        ──► disk     written and read with as many threads as the daemon has for a directory
        ──► printed: on which disks a codec pays
"""
