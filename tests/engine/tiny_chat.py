"""A tiny random chat model, tokenizer and template included, that writes printable ASCII."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from real_models import random_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<end>", "<|system|>", "<|user|>", "<|assistant|>")
END = 256
VOCABULARY = 256 + len(SPECIAL)
MAX_CONTEXT = 1024
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<end>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ mood or '' }}{% endif %}"
)


def byte_tokenizer() -> Any:
    """Every byte is a token; those of characters beyond ASCII say nothing alone."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=TEMPLATE)


def word_tokenizer() -> Any:
    """Like Llama 2's: words with the space before them, and bytes for what is not a word."""
    words = ["\u2581the", "\u2581", "the", "\u2581cat", "s", ".", "\u2581\u2581"]
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def write_model(folder: Path) -> Path:
    """Write the model; greedy answers are long, and differ with the prompt."""
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "max_position_embeddings": MAX_CONTEXT}
    special = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": None}
    model = random_model("LlamaConfig", 5, **sizes, **special)
    tokenizer = byte_tokenizer()
    printable = {token for token in range(256) if " " <= tokenizer.decode([token]) <= "~"}
    assert len(printable) == 95
    with torch.no_grad():
        for token in set(range(VOCABULARY)) - printable:
            model.lm_head.weight[token] = 0.0
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, written once per run: for a `conftest.py` to import."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny-chat")
