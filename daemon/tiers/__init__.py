"""The tiers below the GPU: DRAM (`dram/`), below it NVMe (`nvme/`), then a store that hosts share (`shared/`).

    store:  requests ► dram/writes ► lower_tier ► nvme/moves/writebehind ► disk
                                              └─► shared/writes          ► store
    match:  requests ► dram/reads  ► lower_tier ► promotion ► a source   ► dram ► the lease grows

DRAM knows one thing below it, which implements `lower_tier.TierBelow`: NVMe, or `lower_tiers.LowerTiers` where there
is a shared tier. `server` has the tiers made, opened and closed by `below_dram`, and gives them to `Cache`;
`requests/stats` and `observe` show their queues and reasons.

source       what promotion asks of a directory or a store
promotion    blocks from lower tiers into frames, in order
lower_tiers  NVMe and the shared tier together
below_dram   makes the tiers that the settings ask for, opens and closes them
forms/       the form of a block outside DRAM: compressed, encrypted
quotas       how much of each tier a tenant may have
store_leases leases to store, in DRAM and on NVMe: who may write where, and how long a place is not reused
unfinished   how much each client may have under such leases
"""
