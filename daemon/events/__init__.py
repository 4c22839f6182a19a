"""KV events: which block is in which tier, for routers that send a request to where its prefix is.

index, tiers ──► events: batches ──► publisher: PUB, and a ROUTER that resends missed batches
"""
