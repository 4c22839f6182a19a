"""The parts of the vLLM connectors. vLLM loads `vllm_v1` and `vllm_tier`, one folder up.

scheduler process                        worker processes
scheduler ── orders ───────────────────► worker        loads and stores in the background
  ├ lookups  asks what the cache has       ├ weights   the rank's model: whether it is still the same
  ├ stores   blocks to store               └ log       what was moved
  ├ costs    whether a load pays
  └ names    what blocks are called

groups     KV cache groups, and vLLM's KV tensors as pools of blocks
settings   what can be configured
siblings   below MultiConnector
tier       for `vllm_tier`, below vLLM's own offloading; imports vLLM itself
compat     everything else that is used of vLLM, and whether this version of it fits
"""
