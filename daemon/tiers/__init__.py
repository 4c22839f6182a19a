"""The tiers below the GPU: DRAM (`dram/`), and below it NVMe (`nvme/`). `lower_tier` is the seam between the two.

    store:  requests ► dram/writes ► lower_tier ► nvme/moves/writebehind ► disk
    match:  requests ► dram/reads  ► lower_tier ► nvme/moves/promotion   ► dram ► the lease grows

A new tier implements `lower_tier.TierBelow`. `quotas` applies to each tier.
"""
