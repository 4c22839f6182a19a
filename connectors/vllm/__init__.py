"""The parts of the vLLM connectors. vLLM loads `vllm_v1` and `vllm_tier`, one folder up.

    scheduler process                        worker processes
    scheduler ── orders ───────────────────► worker        loads and stores in the background
      ├ stores      blocks to store            ├ pool      vLLM's KV tensors as pools of blocks
      ├ hashes      vLLM's own block hashes    ├ built, weights, cards   identify what computes the blocks
      └ costs       whether a load pays        └ stats, log              what was moved

    tier_form, tier_jobs, tier_lookups   for `vllm_tier`, below vLLM's own offloading
    compat      everything used of vLLM, and the versions that this was written for
    siblings    as one of several connectors, below MultiConnector

Imports of vLLM go through `compat`.
"""
