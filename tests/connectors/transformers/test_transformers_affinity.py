"""What the affinity query says of a transformers prompt is what `restore` then finds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from tiny_models import tiny_model
from waiting import wait_until

import tiercache
from tiercache.connectors.transformers_cache import PrefixCache
from tiercache.http.affinity import Affinity, Query, UnknownModel

pytestmark = pytest.mark.engine


def test_it_agrees_with_restore(open_cache: Callable[..., PrefixCache], daemon: tiercache.LaunchedDaemon) -> None:
    model = tiny_model("LlamaConfig")
    cache = open_cache(model, salt="s3cret")
    prompt = torch.arange(3, 103)[None]
    with tiercache.Client.connect(daemon.address, map_arena=False, request_timeout_s=30.0) as client:
        affinity = Affinity(client)

        def matched(content: str = type(model).__name__, salt: str = "s3cret") -> int:
            """As soon as the model is known."""
            found: list[int] = []

            def known() -> bool:
                with suppress(UnknownModel):
                    found.append(
                        int(affinity.ask(Query(model=content, tokens=prompt[0].tolist(), salt=salt))["matched"])
                    )
                return bool(found)

            wait_until(known, "the cache announces its model")
            return found[0]

        assert matched() == 0
        restored = cache.restore(prompt)
        model(input_ids=prompt, past_key_values=restored)
        assert cache.store(restored, prompt) == 6
        before = cache.watch.content.hex()
        assert (matched(), matched(before), matched(salt="")) == (96, 96, 0)
        assert cache.restore(prompt).known_tokens == 96
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
        assert cache.restore(prompt).known_tokens == 0  # other weights, and another name
        after = cache.watch.content.hex()
        assert (matched(after), before != after) == (0, True)
