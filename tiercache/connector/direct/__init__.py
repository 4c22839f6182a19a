"""Direct access: blocks that bypass DRAM, between NVMe and the engine's pool (GPUDirect Storage).

    probe ──► backend    does GPUDirect work on this directory; and the reads and writes themselves
    loads     extents under a read lease ► reads into the pool ► checksums ► the daemon confirms
    stores    places on NVMe under a write lease ► writes from the pool ► commit
    gds, transfers       shared by loads and stores

`probe_stage` runs in its own process, because a driver may hang. kvikio is imported in `backend` and `probe_stage`.
"""
