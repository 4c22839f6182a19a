"""Hints: what clients say about the further use of their blocks, on the way to the policy.

    a hint ──► hints: which chains in which tier ──► chain_hints: what is known of an end ──► hinted_policy

`hinted_policy` wraps the policy of a tier: hints take precedence over the policy. Until the first hint
`switched_policy` leaves it out.
"""
