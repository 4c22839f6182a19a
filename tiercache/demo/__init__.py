"""`tiercache demo`: the cache at work on this machine, with a model of its own if none is given.

    prompt   one long prompt, from each tier in turn
    chat     conversations with a server whose KV pool holds a quarter of them
    model    a small random model and some text
    child, worker, vllm_worker   the processes that these start; each ends with the demo

The command itself is tiercache/cli/demo.py.
"""
