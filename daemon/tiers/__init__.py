"""The tiers below the GPU: DRAM (`dram/`), and below it NVMe (`nvme/`). `lower_tier` is the seam between the two.

    store:  requests ► dram/writes ► lower_tier ► nvme/moves/writebehind ► disk
    match:  requests ► dram/reads  ► lower_tier ► nvme/moves/promotion   ► dram ► the lease grows

The tier below DRAM implements `lower_tier.TierBelow`. `server` makes it and gives it to `Cache`, which takes one.
A further tier would need a seam of its own where NVMe evicts.
quotas       how much of each tier a tenant may have
quarantine   leases to store, in both tiers: who may write where, and until when a place gets no other owner
unfinished   how much each client may have under such leases
"""
