"""`tiercache demo`: shows the cache at work on this machine, with its own model if none is given.

    prompt   one long prompt, from each tier in turn ───────────────────────────► worker, vllm_worker: engine processes
    chat     conversations with a server whose KV pool holds a quarter of them ─► tiercache/cli/demo/server.py
    hosts    one prompt on two hosts that share a store ────────────────────────► valkey: a server of the demo's own
    child    starts these processes; each ends with the demo
    model    a small random model and some text

The command itself is in tiercache/cli/demo.
"""
