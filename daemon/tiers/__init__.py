"""The tiers below the GPU: DRAM (`dram/`), below it NVMe (`nvme/`), then a store that hosts share (`shared/`).

    store:  requests ► dram/writes ► dram/below ► nvme/moves/writebehind ► disk
                                              └─► shared/writes          ► store
    match:  requests ► dram/reads  ► dram/below ► dram/promotion ► a source ► the lease grows

DRAM knows one thing below it, which implements `dram/below.TierBelow`: NVMe, or `lower_tiers.LowerTiers` where there
is a shared tier. `server` has the tiers made, opened and closed by `below_dram`, and gives them to `Cache`;
`requests/stats` and `observe` show their queues and reasons.

lower_tiers  NVMe and the shared tier together
below_dram   makes the tiers that the settings ask for, opens and closes them
forms/       the form of a block outside DRAM: compressed, encrypted
"""
