"""The engine's side of the cache: match, load, store. Start with `connector`, which shows the contract.

    match (in `connector`, as all that moves no block)
      └─────► loads    lease ► copies ► the daemon confirms ► good
    store ──► stores   reserve ► copies ► commit, under a `write_lease`
                 └ mover    one window of blocks: through the mapped arena, or as payload frames
    blocks      the values that these hand on: which blocks of the pool, where in the chain, until when
    costs       load or recompute: for engines that ask which blocks of a match pay
    jobs        the queue and the thread of asynchronous transfers; outcomes: what is counted and logged of them
    direct/     the same, bypassing DRAM: between the disks and the pool (GPUDirect Storage)

A load that was not confirmed is a miss. This folder imports `client` and `copies`, but no engine.
"""
