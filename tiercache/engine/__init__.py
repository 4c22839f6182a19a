"""A small paged-attention engine that serves Hugging Face decoders, with tiercache below its KV pool.

    engine = Engine(model_dir, EngineSettings(), connect=connect_to(address))
    [output] = engine.generate([prompt_tokens], SamplingParams(max_tokens=32))

Needs the `engine` extra (torch, transformers).
"""

from __future__ import annotations

from tiercache.engine.cache import CacheLike
from tiercache.engine.connect import Connect, connect_to
from tiercache.engine.engine import Engine
from tiercache.engine.identity import describe_model
from tiercache.engine.llm import LLM
from tiercache.engine.outputs import RequestOutput, StepOutput
from tiercache.engine.sampling import SamplingParams
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
