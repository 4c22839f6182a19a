"""The demo's default model and text: a small random model, and text found on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tiercache.errors import ConfigError

MODEL_SEED = 1
VOCABULARY = 256 + 1  # every byte, and an end-of-text token
END = 256
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
"""Chat template, also for models without one."""


class Size(NamedTuple):
    """Dimensions of a Llama; heads have 64 elements."""

    hidden: int
    intermediate: int
    layers: int
    kv_heads: int


SIZES = {"20M": Size(512, 1376, 8, 2), "100M": Size(768, 2048, 16, 4)}


def build_model(folder: Path, size: str = "20M") -> str:
    """Write a randomly initialised fp32 Llama of `SIZES[size]` and a byte-level tokenizer to `folder`.

    Returns a line that describes it. It generates noise of printable ASCII, but does the same computations as a
    trained model of its size. Takes a second or two.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(MODEL_SEED)
    hidden, intermediate, layers, kv_heads = SIZES[size]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=kv_heads,
        max_position_embeddings=131_072,
        bos_token_id=None,
        eos_token_id=END,
        initializer_range=0.08,  # answers depend on the whole prompt
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    tokenizer = _byte_tokenizer()
    with torch.no_grad():
        for token in range(VOCABULARY):
            # Scores of 0 are never the highest, so answers are readable and give the same tokens when sent back.
            if token == END or not " " <= tokenizer.decode([token]) <= "~":
                model.lm_head.weight[token] = 0.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"a random-initialised Llama of {parameters / 1e6:.0f}M parameters in fp32 (it writes noise; give --model)"


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate([*alphabet, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=CHAT_TEMPLATE)


def prompt_tokens(model: Path, prompt_file: Path | None, count: int) -> tuple[list[int], str]:
    """The first `count` tokens of a text, and the text's source. Raises ConfigError and ModelRefused."""
    from tiercache.engine.prompts import load_tokenizer

    if prompt_file is None:
        text, source = _text_at_hand(), "the language reference in Python's own help"
    else:
        try:
            text, source = prompt_file.read_text(errors="replace"), str(prompt_file)
        except OSError as error:
            raise ConfigError(f"--prompt-file {prompt_file} cannot be read: {error.strerror}") from error
    # No tokenizer makes more than one token of a byte, so this is always enough and never wasteful.
    tokenizer = load_tokenizer(model)
    tokens: list[int] = tokenizer(text[: 16 * count], add_special_tokens=False)["input_ids"]
    if len(tokens) < count:
        raise ConfigError(f"{source} has {len(tokens)} tokens: ask for --tokens {len(tokens)} or give a longer text")
    return tokens[:count], source


def _text_at_hand() -> str:
    """About 700 kB of English that comes with every Python."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))
