"""The tiers below the GPU: DRAM (`dram/`), and below it NVMe (`nvme/`). `lower_tier` is the seam between the two.

    store:  requests ► dram/writes ► lower_tier ► nvme/moves/writebehind ► disk
    match:  requests ► dram/reads  ► lower_tier ► promotion ► a source   ► dram ► the lease grows

The tier below DRAM implements `lower_tier.TierBelow`. `server` makes, opens and closes it, and gives it to `Cache`,
which takes one; `requests/stats` and `observe` show its queues and reasons. NVMe drops what it evicts: a third tier
needs a new interface there.

quotas       how much of each tier a tenant may have
store_leases leases to store, in both tiers: who may write where, and how long a frame or slot is not reused
unfinished   how much each client may have under such leases
"""
