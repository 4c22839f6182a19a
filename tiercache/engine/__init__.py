"""A small paged-attention engine that serves Hugging Face decoders, with tiercache below its KV pool.

    engine = Engine(model_dir, EngineSettings(), connect=connect_to(address))
    [output] = engine.generate([prompt_tokens], SamplingParams(max_tokens=32))

Needs the `engine` extra (torch, transformers). Its names are loaded when they are first used, so that settings and
help can be read without torch.

    llm (prompts), async_engine ──► engine: one step ──► scheduler ──► model, attention ──► sampling
    torch_attention, cuda_attention        attention on a CPU and on a GPU; decode_graphs: decode as CUDA graphs
    probe                                  whether a model computes the same over the pool, tried when it is loaded
    sequence, blocks, kv_pool              what a request has in the KV pool
    connect, cache, loads, offload         the cache below the pool; tier_format: blocks in fewer bits there
    settings                               an engine's settings, and its clock
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiercache.engine.cache import CacheLike
    from tiercache.engine.connect import Connect, connect_to, describe_model
    from tiercache.engine.engine import Engine
    from tiercache.engine.llm import LLM
    from tiercache.engine.sampling import SamplingParams
    from tiercache.engine.sequence import RequestOutput, StepOutput
    from tiercache.engine.settings import EngineSettings

__all__ = [
    "LLM",
    "CacheLike",
    "Connect",
    "Engine",
    "EngineSettings",
    "RequestOutput",
    "SamplingParams",
    "StepOutput",
    "connect_to",
    "describe_model",
]

_MODULES = {
    "LLM": "llm",
    "CacheLike": "cache",
    "Connect": "connect",
    "Engine": "engine",
    "EngineSettings": "settings",
    "RequestOutput": "sequence",
    "SamplingParams": "sampling",
    "StepOutput": "sequence",
    "connect_to": "connect",
    "describe_model": "connect",
}
"""Public name -> the module that defines it."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
