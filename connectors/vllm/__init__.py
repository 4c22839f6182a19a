"""The parts of the vLLM connectors. vLLM loads `vllm_v1` and `vllm_tier`, one folder up.

scheduler process                        worker processes
scheduler ── orders ───────────────────► worker        loads and stores in the background
  ├ lookups  asks what the cache has       │
  ├ stores   blocks to store               ├ pool      vLLM's KV tensors as pools of blocks
  ├ costs    whether a load pays           ├ weights   whether the weights are still the same
  ├ names    what blocks are called        │   └ built    what a rank has built around them
  └ events                                 └ stats, log   what was moved

hashes, cards   vLLM's own block hashes, for affinity queries       settings   what can be configured
siblings        below MultiConnector
tier_form, tier_jobs, tier_lookups   for `vllm_tier`, below vLLM's own offloading: these import vLLM themselves;
                tier_lookups asks the cache through lookups, too
callers         what vLLM knows and does not pass on
compat          everything else that is used of vLLM, and the versions that this was written for
"""
