"""Images on real vLLM: a hit needs the same images at the same places, and ids that users give to images name their
content only where the setting `media_ids` says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm_engines import BLOCK, Engine, flush, launch, prompt, stored_blocks, wait_until
from vllm_media import IMAGE, IMAGE_TOKENS, save_image_model

import tiercache

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
LAYOUTS = [(40, 40), (40, 0), (29, 0), (30, 40), (31, 2), (32, 70), (0, 30)]
"""Tokens of text before an image, and after it: prompts that end with the image, within a block and at its end; an
image whose embeddings fill two blocks; an image before, behind and at the first end of a block, and at the start."""
PROMPTS = [
    [*prompt(before, f"{place} before"), IMAGE, *prompt(after, f"{place} after")]
    for place, (before, after) in enumerate(LAYOUTS)
]
FULL = [(before + IMAGE_TOKENS + after) // BLOCK * BLOCK for before, after in LAYOUTS]
BEFORE = [before // BLOCK * BLOCK for before, _ in LAYOUTS]
TWO = [*prompt(40, "two"), IMAGE, *prompt(20, "between"), IMAGE, *prompt(30, "end")]
FIRST_OF_TWO = (40 + IMAGE_TOKENS + 20) // BLOCK * BLOCK
ALL_OF_TWO = (40 + 20 + 30 + 2 * IMAGE_TOKENS) // BLOCK * BLOCK
TEXT = prompt(200, "text")


@dataclass(frozen=True)
class Engines:
    """Three engines that live at one place."""

    content: Engine  # with `media_ids` `content`
    cold: Engine  # the same, in another process
    own: Engine  # with the default
    run_dir: Path
    right: dict[int, list[list[int]]]  # by image: the tokens of PROMPTS without a cache
    right_of_two: dict[tuple[int, int], list[int]]  # by images: those of TWO


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("media")
    model, run_dir = save_image_model(folder / "model"), folder / "run"
    options = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 2}}
    with ExitStack() as stack:

        def start(name: str, **settings: str) -> Engine:
            engine = Engine(model, folder / name, str(run_dir), dict(settings), **options)
            stack.callback(engine.close)
            return engine

        content, cold = start("content", media_ids="content"), start("cold", media_ids="content")
        own = start("own")
        right = {seed: content.regenerate(PROMPTS, images=[[seed]] * len(PROMPTS))[0] for seed in (1, 2)}
        pairs = [(1, 2), (1, 3), (2, 1)]
        of_two = {pair: content.regenerate([TWO], images=[pair])[0][0] for pair in pairs}
        assert all(one != other for one, other in zip(right[1], right[2], strict=True)), "images change what follows"
        assert len({tuple(tokens) for tokens in of_two.values()}) == len(pairs)
        yield Engines(content, cold, own, run_dir, right, of_two)


@pytest.fixture
def daemon(engines: Engines) -> Iterator[tiercache.LaunchedDaemon]:
    with launch("64MiB", region="16MiB", run_dir=engines.run_dir) as daemon:
        for engine in (engines.content, engines.cold, engines.own):
            wait_until(lambda engine=engine: engine.ask("check")["available"])
        yield daemon


def await_images(engine: Engine, seed: int, right: list[list[int]], ids: str = "") -> None:
    """Ask until PROMPTS with this image come from the cache as far as they can, with the right tokens."""
    fields: dict[str, Any] = {"media_ids": [[ids]] * len(PROMPTS)} if ids else {}

    def found() -> bool:
        tokens, cached = engine.regenerate(PROMPTS, images=[[seed]] * len(PROMPTS), **fields)
        assert tokens == right
        return cached == FULL

    wait_until(found)


def test_another_engine_finds_an_image_by_its_content_at_its_place(
    engines: Engines, daemon: tiercache.LaunchedDaemon
) -> None:
    one = [[1]] * len(PROMPTS)
    assert engines.content.regenerate(PROMPTS, images=one) == (engines.right[1], [0] * len(PROMPTS))
    await_images(engines.content, 1, engines.right[1])
    assert engines.cold.regenerate(PROMPTS, images=one) == (engines.right[1], FULL)
    assert engines.cold.counts()["loaded_blocks"] == sum(FULL) // BLOCK
    # Another image has the same tokens, but only what comes before it is the same.
    assert engines.cold.regenerate(PROMPTS, images=[[2]] * len(PROMPTS)) == (engines.right[2], BEFORE)
    await_images(engines.content, 2, engines.right[2])
    assert engines.cold.regenerate(PROMPTS, images=one) == (engines.right[1], FULL)

    # And of two images, the first may be the same.
    right = engines.right_of_two
    wait_until(lambda: engines.content.regenerate([TWO], images=[(1, 2)]) == ([right[1, 2]], [ALL_OF_TWO]))
    assert engines.cold.regenerate([TWO], images=[(1, 2)]) == ([right[1, 2]], [ALL_OF_TWO])
    assert engines.cold.regenerate([TWO], images=[(1, 3)]) == ([right[1, 3]], [FIRST_OF_TWO])
    assert engines.cold.regenerate([TWO], images=[(2, 1)]) == ([right[2, 1]], [40 // BLOCK * BLOCK])


def test_by_default_only_the_engine_itself_finds_its_images(engines: Engines, daemon: tiercache.LaunchedDaemon) -> None:
    nothing, one = [0] * len(PROMPTS), [[1]] * len(PROMPTS)
    await_images(engines.content, 1, engines.right[1])
    engines.content.await_hits(TEXT)
    shared = stored_blocks(daemon)
    assert engines.own.regenerate([TEXT])[1] == [200 // BLOCK * BLOCK], "text is for all"
    assert engines.own.regenerate(PROMPTS, images=one) == (engines.right[1], nothing)
    await_images(engines.own, 1, engines.right[1])
    assert stored_blocks(daemon) > shared
    flush(daemon)
    await_images(engines.own, 2, engines.right[2])
    assert engines.cold.regenerate(PROMPTS, images=[[2]] * len(PROMPTS)) == (engines.right[2], nothing)
