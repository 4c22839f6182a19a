"""Images on real vLLM: a hit needs the same images at the same places, and ids that users give to images name their
content only where the setting `media_ids` says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_engines import BLOCK, Engine, launch, prompt, wait_until
from vllm_media import IMAGE, IMAGE_TOKENS, save_image_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
LAYOUTS = [(40, 40), (29, 0), (32, 70), (0, 30)]
"""Tokens of text before an image, and after it: prompts that end with the image, an image that begins where a block
does, and one at the start."""
PROMPTS = [
    [*prompt(before, f"{place} before"), IMAGE, *prompt(after, f"{place} after")]
    for place, (before, after) in enumerate(LAYOUTS)
]
FULL = [(before + IMAGE_TOKENS + after) // BLOCK * BLOCK for before, after in LAYOUTS]
BEFORE = [before // BLOCK * BLOCK for before, _ in LAYOUTS]
NOTHING = [0] * len(PROMPTS)
TEXT = prompt(200, "text")


def test_images_are_found_by_their_content_at_their_place_and_by_default_in_one_engine(
    start: object, tmp_path: Path
) -> None:
    model, run_dir = save_image_model(tmp_path / "model"), tmp_path / "run"

    def begin(**settings: str) -> Engine:
        options = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 2}}
        engine: Engine = start(str(run_dir), settings, model=model, **options)  # type: ignore[operator]
        return engine

    def ask(engine: Engine, seed: int, name: str = "") -> tuple[list[list[int]], list[int]]:
        named = {"media_ids": [[name]] * len(PROMPTS)} if name else {}
        return engine.regenerate(PROMPTS, images=[[seed]] * len(PROMPTS), **named)

    content, cold, own = begin(media_ids="content"), begin(media_ids="content"), begin()
    right = {seed: ask(content, seed)[0] for seed in (1, 2)}
    assert all(one != other for one, other in zip(right[1], right[2], strict=True)), "images change what follows"
    with launch("64MiB", region="16MiB", run_dir=run_dir):
        for engine in (content, cold, own):
            wait_until(lambda engine=engine: engine.ask("check")["available"])
        wait_until(lambda: ask(content, 1) == (right[1], FULL))
        assert ask(cold, 1) == (right[1], FULL)
        assert ask(cold, 2) == (right[2], BEFORE), "another image has the same tokens"
        content.await_hits(TEXT)
        assert own.regenerate([TEXT], 1)[1] == [192], "text is for all"
        assert ask(own, 1) == (right[1], NOTHING)
        wait_until(lambda: ask(own, 1) == (right[1], FULL))

        # A user calls two images by one id: vLLM has the same hashes for both.
        wait_until(lambda: ask(content, 1, "cat") == (right[1], FULL))
        assert ask(own, 2, "cat") == (right[2], BEFORE)
        wait_until(lambda: ask(own, 2, "cat") == (right[2], FULL))
        assert ask(cold, 1, "cat") == (right[1], FULL)
        assert ask(cold, 2, "dog") == (right[2], BEFORE)
