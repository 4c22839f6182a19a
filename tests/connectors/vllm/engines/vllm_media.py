"""A tiny random model that sees images, and prompts with images in them.

It is an Idefics3 with SigLIP's encoder and Llama: vLLM's code for most other models that see imports torchvision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SPECIAL = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
IMAGE = 512
"""The token id that stands for an image in a prompt: the first after those of `prompt` in `vllm_engines`."""
PIXELS = 64
IMAGE_TOKENS = 64 + 3
"""Tokens of an image in the prompt as vLLM computes it: two before its 64 embeddings, and one after them."""


def save_image_model(folder: Path) -> str:
    """The model, its processor and its tokenizer; returns its folder."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from vllm_engines import COMMON

    torch.manual_seed(0)
    numbers = {word: number for number, word in enumerate([*(f"w{n}" for n in range(IMAGE)), *SPECIAL])}
    words = Tokenizer(models.WordLevel(numbers, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w2", pad_token="w0", extra_special_tokens=SPECIAL
    )
    eye = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Idefics3Config(
        text_config={**COMMON, "model_type": "llama", "vocab_size": len(numbers)},
        vision_config={**eye, "image_size": PIXELS, "patch_size": 4, "initializer_range": 0.3},
        image_token_id=IMAGE,
        pad_token_id=0,
        scale_factor=2,
    )
    transformers.Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    edge = {"longest_edge": PIXELS}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    transformers.Idefics3Processor(images, tokenizer, image_seq_len=IMAGE_TOKENS - 3).save_pretrained(folder)
    return str(folder)


def image(seed: int) -> Any:
    """Noise, as a picture."""
    import numpy
    from PIL import Image

    return Image.fromarray(numpy.random.default_rng(seed).integers(0, 256, (PIXELS, PIXELS, 3), dtype=numpy.uint8))


def with_images(
    prompts: list[dict[str, Any]], seeds: list[list[int]], ids: list[list[str]] | None
) -> list[dict[str, Any]]:
    """The prompts with the images of each; `ids` are those that a user gives to the images."""
    seen = [{**one, "multi_modal_data": {"image": [*map(image, own)]}} for one, own in zip(prompts, seeds, strict=True)]
    if ids is None:
        return seen
    return [{**one, "multi_modal_uuids": {"image": own}} for one, own in zip(seen, ids, strict=True)]
