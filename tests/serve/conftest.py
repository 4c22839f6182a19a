"""The tiny chat model, written once per run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_chat import write_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny-chat")
