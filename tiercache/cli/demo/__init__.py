"""`tiercache demo`: plays what is in tiercache/demo, and prints it.

    command ──► show ──► tiercache.demo.prompt    one long prompt from each tier
                    ──► tiercache.demo.chat ──► server, a process: conversations with `tiercache serve`
                    ──► hosts ──► tiercache.demo.hosts    two hosts that share a store

`command` is only the declaration, so that its help needs no torch.
"""
