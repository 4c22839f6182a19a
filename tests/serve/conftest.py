"""The tiny chat model, written once per run."""

import torch
from tiny_chat import model_dir as model_dir

torch.set_num_threads(1)
