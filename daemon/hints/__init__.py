"""What clients say of the further use of their blocks, on its way to the policy.

    a hint ──► hints: which chains in which tier ──► chain_hints: what is known of an end ──► hinted_policy

`hinted_policy` wraps the policy of a tier: what a client has said comes before what the policy thinks.
"""
