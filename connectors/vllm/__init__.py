"""The parts of the vLLM connectors. vLLM loads `vllm_v1` and `vllm_tier`, one folder up.

scheduler process                        worker processes
scheduler ── orders ───────────────────► worker        loads and stores in the background
  ├ lookups  asks what the cache has       ├ weights   the rank's model: whether it is still the same
  ├ stores   blocks to store               └ log       what was moved
  ├ costs    whether a load pays
  └ names    what blocks are called

How a hit reaches a GPU; daemon/BLOCK.md names each function:

    scheduler.add ─► lookups, a thread ─► Connector.match: a ticket, whose lease the daemon holds
    scheduler.matched_tokens ─► costs: worth a load?      vLLM allocates blocks
    scheduler.allocated ─► orders.loads ─► scheduler.step ─► vLLM's metadata, to the worker processes
    handle_preemptions ─► worker.begin ─► Connector.load_async, a thread ─► mover ─► copies ─► the GPU
    worker.ended_loads ─► vLLM's output ─► scheduler.loads_ended

groups     KV cache groups, and vLLM's KV tensors as pools of blocks
settings   what can be configured
siblings   below MultiConnector
tier       for `vllm_tier`, below vLLM's own offloading; imports vLLM itself
compat     everything else that is used of vLLM, and whether this version of it fits
"""
