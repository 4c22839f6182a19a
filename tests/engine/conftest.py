"""Tiny models, saved once per test run."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_models import SaveModel, model_saver
from tiny_chat import model_dir as model_dir


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> SaveModel:
    return model_saver(tmp_path_factory.mktemp)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits for the answer of a busy daemon, however long that takes."""
    monkeypatch.setattr("tiercache.engine.loads.LOOKUP_TIMEOUT_S", 60.0)


@pytest.fixture(scope="session")
def llama(save_model: SaveModel) -> Path:
    return save_model("LlamaConfig")
