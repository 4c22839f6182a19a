"""`tiercache doctor`: what is wrong with the host, its disks and the daemon, and what to do about it.

    command ──► host, disk, store, gpu, daemon, hits ──► findings ──► printed
                each examines one subject    with state, figure and remedy

A check that fails itself becomes a finding, and does not stop the others. `gpu` tries the driver and GPUDirect in
processes of their own: a hung driver would take this one with it.
"""
