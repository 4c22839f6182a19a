"""Tiny models with random weights, saved once per test run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from random_models import COMMON, SaveModel
from transformers import AutoModelForCausalLM

import tiercache

transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def patient_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines wait for the daemon: by default an answer that a busy machine delays is a miss, and hits are counted."""
    patient = functools.partial(tiercache.connect, request_timeout_s=20.0, load_timeout_s=20.0)
    monkeypatch.setattr(tiercache, "connect", patient)


@pytest.fixture
def all_hits_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines never learn what computing costs: it takes a tiny model less than a load on a busy machine."""
    monkeypatch.setattr("tiercache.engine.cost.CostModel.note_step", lambda *_, **__: None)


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> SaveModel:
    """`save_model("LlamaConfig", option=...)` writes a model folder, once for equal options."""
    saved: dict[str, Path] = {}

    def save(config_class: str, **options: Any) -> Path:
        name = f"{config_class}{sorted(options.items(), key=str)}"
        if name not in saved:
            torch.manual_seed(len(config_class))
            config = getattr(transformers, config_class)(**{**COMMON, **options})
            folder = tmp_path_factory.mktemp(config_class)
            model = AutoModelForCausalLM.from_config(config)
            with torch.no_grad():
                for parameter in model.parameters():  # what is 0 at the start (sinks, biases) must count too
                    if not parameter.any():
                        parameter.normal_(std=0.3)
            model.save_pretrained(folder, safe_serialization=True)
            saved[name] = folder
        return saved[name]

    return save


@pytest.fixture(scope="session")
def llama(save_model: SaveModel) -> Path:
    return save_model("LlamaConfig")
