"""The tiers below the GPU: DRAM (`dram/`), below it NVMe (`nvme/`), then a store that hosts share (`shared/`).

    store:  requests ► dram/writes ► dram/below ► nvme/moves/writebehind ► disk
                                              └─► shared/writes          ► store
    match:  requests ► dram/reads  ► dram/below ► dram/promotion ► a source ► the lease grows

DRAM knows one thing below it, a `dram/below.TierBelow`: in a daemon that is `lower_tiers.LowerTiers`. `server` has it
made, opened and closed, and gives it to `Cache`; `requests/stats` and `observe` show its queues and reasons.

lower_tiers  NVMe and the shared tier together, as the settings ask for: made, attached, opened, closed
forms/       the form of a block outside DRAM: compressed, encrypted
"""
