"""Copies: moving bytes between an engine's KV pool and the arena.

    pool: the addresses of block b ─────┐
                                        ├── copy_plan: which bytes, in which way ──► memcpy   CPU pools
    arena: where a frame is mapped ─────┘                                       └──► cuda     GPU pools

`host_memory` locks pages and registers them with CUDA. `cuda_driver` is the driver through ctypes, `cuda_lane` one
direction of copies on a GPU. Nothing here talks to the daemon. Only `cuda` and `cuda_lane` import torch.
"""
