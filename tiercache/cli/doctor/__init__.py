"""`tiercache doctor`: what is wrong with the host, its disks and the daemon, and what to do about it.

    command ──► host, disk, store, cuda, daemon, hits, gpudirect ──► findings ──► printed
                each examines one subject                     state, figure, remedy

A check that fails itself becomes a finding, and does not stop the others. `cuda` tries the driver in a process of its
own: a hung driver would take this one with it.
"""
