"""`generate` with the cache against `generate` without, on tiny models and a real daemon."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import Open, greedy, prompt, tiny_model
from waiting import wait_until

import tiercache
from tiercache.connectors import transformers_cache
from tiercache.connectors.transformers_cache import PrefixCache
from tiercache.errors import ModelRefused
from tiercache.http.affinity import Affinity, Query, UnknownModel
from tiercache.protocol.hints import Hint

pytestmark = pytest.mark.engine
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
SERVED: list[tuple[str, dict[str, Any]]] = [
    ("LlamaConfig", {}),
    ("Qwen3Config", {}),
    ("MistralConfig", {"sliding_window": 24}),
    (
        "Gemma3TextConfig",
        {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    ),
    ("GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}),
    ("DeepseekV3Config", MLA),
]


@pytest.mark.parametrize(("config_class", "options"), SERVED, ids=[name for name, _ in SERVED])
def test_tokens_are_those_of_plain_generate(open_cache: Open, config_class: str, options: dict[str, Any]) -> None:
    model = tiny_model(config_class, **options)
    long = prompt(150)
    longer = torch.cat([long[:, :100], prompt(60, seed=1)], dim=1)
    expected = greedy(model, long), greedy(model, longer)
    first = open_cache(model)
    assert greedy(first, long) == expected[0]
    assert first.connector.counters["stored_blocks"] == 10  # 150 + 12 tokens, of which the last has no K and V
    second = open_cache(model)  # as another process would
    assert greedy(second, long) == expected[0]
    assert greedy(second, longer) == expected[1]
    assert second.connector.counters["loaded_blocks"] == 9 + 6
    assert second.bypassed == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
@pytest.mark.parametrize("off", [slice(80, 100), slice(20, 40)], ids=["at the end", "in between"])
def test_a_mask_that_hides_tokens_goes_without_the_cache(open_cache: Open, dtype: torch.dtype, off: slice) -> None:
    """Whatever the mask's type: K and V computed under it belong to other tokens than those behind the padding."""
    model = tiny_model("LlamaConfig")
    ids = prompt(100)
    mask = torch.ones_like(ids)
    mask[:, off] = 0
    mask = mask.to(dtype)
    cache = open_cache(model)
    assert greedy(cache, ids, attention_mask=mask) == greedy(model, ids, attention_mask=mask)
    assert cache.bypassed == 1
    kept = cache.restore(ids)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, past_key_values=kept, use_cache=True)
    assert cache.store(kept, ids, mask) == 0
    greedy(cache, ids[:, 20:])
    padded = torch.ones_like(ids).to(dtype)
    padded[:, :20] = 0
    assert greedy(cache, ids, attention_mask=padded) == greedy(model, ids, attention_mask=padded)
    assert cache.connector.counters["loaded_blocks"] == 4


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
@pytest.mark.parametrize("off", [slice(0, 20), slice(80, 100), slice(20, 40)], ids=["left", "right", "in between"])
def test_rows_with_padding_are_neither_restored_nor_stored_by_hand(
    open_cache: Open, dtype: torch.dtype, off: slice
) -> None:
    """A plain `forward` gives the tokens behind padding other places than `generate`, under whose name K would be."""
    model = tiny_model("LlamaConfig")
    ids, cache = prompt(100), open_cache(model)
    mask = torch.ones_like(ids)
    mask[:, off] = 0
    mask = mask.to(dtype)
    text = ids[mask.bool()][None]
    kept = cache.restore(ids)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, past_key_values=kept, use_cache=True)
    assert cache.store(kept, ids, mask) == 0
    assert cache.restore(text).get_seq_length() == 0
    greedy(cache, text)
    assert cache.restore(ids, mask).get_seq_length() == 0
    assert cache.restore(text, torch.ones_like(text, dtype=dtype)).get_seq_length() == 64
    assert cache.restore(text, torch.full_like(text, 2)).get_seq_length() == 0


def test_what_a_plain_forward_computes_is_restored(open_cache: Open) -> None:
    model, ids = tiny_model("LlamaConfig"), prompt(100)
    cache = open_cache(model)
    kept = cache.restore(ids)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=kept, use_cache=True)
    assert cache.store(kept, ids) == 6
    assert cache.restore(ids).get_seq_length() == 96
    assert greedy(cache, ids) == greedy(model, ids)


def test_rows_of_a_batch_begin_after_their_padding(open_cache: Open) -> None:
    model = tiny_model("LlamaConfig")
    ids = prompt(90).repeat(3, 1)
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 7, 40)):
        ids[row, :pad] = 0
        mask[row, :pad] = 0
    expected = greedy(model, ids, attention_mask=mask)
    cache = open_cache(model)
    assert greedy(cache, ids, attention_mask=mask) == expected
    # Rows 1 and 2 begin later in the text than row 0: they are other sequences.
    assert greedy(cache, ids, attention_mask=mask) == expected
    assert cache.connector.counters["loaded_blocks"] == 5 + 5 + 3, "up to the end of the shortest hit"


def test_padding_that_a_model_sees_once_something_is_cached_goes_without_the_cache(open_cache: Open) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = tiny_model("GitConfig", vision_config={**vision, "image_size": 28, "patch_size": 14})
    ids, mask = prompt(60), torch.ones(1, 60, dtype=torch.long)
    ids[:, :21] = mask[:, :21] = 0
    cache = open_cache(model)
    assert greedy(cache, ids, attention_mask=mask) == greedy(model, ids, attention_mask=mask)
    assert (cache.bypassed, cache.connector.counters["stored_blocks"]) == (1, 0)


def test_padding_that_scales_attention_only_in_long_prompts_goes_without_the_cache(open_cache: Open) -> None:
    layers = {"layer_types": ["full_attention"] * 3, "no_rope_layers": [1, 0, 1], "floor_scale": 40}
    model = tiny_model("Llama4TextConfig", num_local_experts=2, intermediate_size_mlp=96, **layers)
    ids, mask = prompt(100), torch.ones(1, 100, dtype=torch.long)
    ids[:, :21] = mask[:, :21] = 0
    cache = open_cache(model)
    assert greedy(cache, ids, attention_mask=mask) == greedy(model, ids, attention_mask=mask)
    assert (cache.bypassed, cache.connector.counters["stored_blocks"]) == (1, 0)
    assert greedy(cache, ids[:, 21:]) == greedy(model, ids[:, 21:])
    assert cache.connector.counters["stored_blocks"] > 0


def test_a_batch_waits_no_longer_for_a_slow_daemon_than_a_load_may_take(
    open_cache: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny_model("LlamaConfig"), prompt(60).repeat(3, 1)
    cache = open_cache(model)
    greedy(cache, ids)
    monkeypatch.setattr(cache.connector, "load_timeout_s", -1.0)
    match, store = cache.connector.match, cache.connector.store
    asked = list[str]()
    monkeypatch.setattr(cache.connector, "match", lambda keys: asked.append("match") or match(keys))
    monkeypatch.setattr(cache.connector, "store", lambda *keys, **how: asked.append("store") or store(*keys, **how))
    assert greedy(cache, ids) == greedy(model, ids)
    assert asked == ["match"], "and nothing was stored after that time"


def test_storing_ends_with_the_piece_after_which_the_daemon_is_too_slow(
    open_cache: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One prompt may have many pieces, each a request; and each row has a hint of its own."""
    model, ids, now_s = tiny_model("LlamaConfig"), prompt(100).repeat(2, 1), [0.0]
    cache = open_cache(model, staging="13KiB", load_timeout_s=40.0)
    monkeypatch.setattr(transformers_cache, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    store, hint, asked = cache.connector.store, cache.connector.hint, list[str]()

    def slow_store(*keys: Any, **how: Any) -> Any:
        now_s[0] += 15.0
        asked.append("store")
        return store(*keys, **how)

    monkeypatch.setattr(cache.connector, "store", slow_store)
    monkeypatch.setattr(cache.connector, "hint", lambda *what: asked.append("hint") or hint(*what))
    cache.generate(ids, torch.ones_like(ids), max_new_tokens=1, hint=Hint(done=True))
    assert asked == ["store"] * 3
    said = "is not stored, or not all of it: the daemon takes longer than load_timeout_s, 40 s"
    assert caplog.text.count(said) == 1
    assert "without the cache" not in caplog.text
    monkeypatch.setattr(cache.connector, "store", store)
    cache.generate(ids, torch.ones_like(ids), max_new_tokens=1, hint=Hint(done=True))
    assert asked == ["store"] * 3 + ["hint"] * 2


def test_other_weights_are_another_model(open_cache: Open) -> None:
    model = tiny_model("LlamaConfig")
    ids = prompt(64)
    cache = open_cache(model)
    before = greedy(cache, ids)
    kept = cache.restore(ids)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert cache.store(kept, ids) == 0  # of the former weights
    assert cache.restore(ids).get_seq_length() == 0
    assert greedy(cache, ids) == greedy(model, ids)
    assert cache.restore(ids).get_seq_length() == 48
    assert open_cache(tiny_model("LlamaConfig", seed=2)).restore(ids).get_seq_length() == 0
    again = open_cache(tiny_model("LlamaConfig"))
    assert again.restore(ids).get_seq_length() == 48
    assert greedy(again, ids) == before
    assert open_cache(tiny_model("LlamaConfig"), salt="tenant").restore(ids).get_seq_length() == 0
    assert open_cache(tiny_model("LlamaConfig", rope_theta=5000.0)).restore(ids).get_seq_length() == 0


def test_a_cache_keeps_its_model(open_cache: Open) -> None:
    """Another one would compute under the name of the first."""
    cache = open_cache(tiny_model("LlamaConfig"))
    with pytest.raises(AttributeError):
        cache.model = tiny_model("LlamaConfig", seed=2)  # type: ignore[misc]


def test_each_reason_for_a_bypass_is_said_once(open_cache: Open, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("LlamaConfig")
    ids = prompt(64)
    cache = open_cache(model)
    with caplog.at_level(logging.WARNING):
        for options in ({"num_beams": 2}, {"use_cache": False}) * 2:
            assert greedy(cache, ids, **options) == greedy(model, ids, **options)
        inputs: dict[str, Any] = {"inputs_embeds": model.get_input_embeddings()(ids), "max_new_tokens": 3}
        assert torch.equal(cache.generate(**inputs), model.generate(**inputs))
    assert cache.bypassed == 5
    assert cache.connector.counters["matches"] == 0
    said = [record.getMessage() for record in caplog.records if "without the cache" in record.getMessage()]
    assert len(said) == 3
    assert "its generation mode is beam_search" in said[0]


def test_errors_whose_text_is_never_the_same_do_not_fill_the_log(
    open_cache: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transformers_cache, "MAX_SAID", 3)
    model, numbers = tiny_model("LlamaConfig"), count()
    cache = open_cache(model)

    def fail(*_: object) -> None:
        raise RuntimeError(f"at {next(numbers)}")

    monkeypatch.setattr(cache, "_match", fail)
    for _ in range(5):
        greedy(cache, prompt(40), max_new_tokens=1)
    assert (next(numbers), caplog.text.count("without the cache")) == (5, 3)


def test_a_daemon_that_dies_is_a_miss_and_its_successor_a_hit() -> None:
    model = tiny_model("LlamaConfig")
    ids = prompt(64)
    expected = greedy(model, ids)
    patient: dict[str, Any] = {"required": True, "request_timeout_s": 60.0}
    with tiercache.launch("16MiB") as daemon, PrefixCache(model, daemon.address, **patient) as cache:
        assert greedy(cache, ids) == expected
        os.kill(daemon.pid, signal.SIGKILL)
        assert greedy(cache, ids) == expected
        with tiercache.launch("16MiB", run_dir=daemon.address):
            wait_until(lambda: cache.connector.available)
            assert greedy(cache, ids) == expected
            assert greedy(cache, ids) == expected
            assert cache.connector.counters["loaded_blocks"] == 3
            cache.close()


def test_attention_that_chooses_keys_is_served_up_to_where_it_does(open_cache: Open) -> None:
    assert open_cache(tiny_model("DogeConfig", keep_window_size=64)).watch.limit == 64


def test_long_rope_is_served_up_to_the_trained_length(open_cache: Open) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
        "factor": 4.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    }
    model = tiny_model("LlamaConfig", rope_parameters=rope)
    cache = open_cache(model)
    for tokens, restored in ((40, 32), (60, 48), (100, 0), (60, 48)):
        ids = prompt(tokens)
        assert greedy(cache, ids, max_new_tokens=2) == greedy(model, ids, max_new_tokens=2)
        assert cache.restore(ids).get_seq_length() == restored
    long = prompt(100, seed=1)
    greedy(cache, long, max_new_tokens=2)
    assert cache.restore(long[:, :60]).get_seq_length() == 0, "its K was computed with the scaling of the long prompt"


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("MambaConfig", {"state_size": 8}, "only K and V per layer"),
    (
        "Qwen3NextConfig",
        {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
        "only K and V per layer",
    ),
    (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "rope_type is dynamic",
    ),
    ("LlamaConfig", {"is_causal": False}, "attend to later ones"),
    ("MoshiConfig", {"sliding_window": 40}, "masks of moshi do not have its sliding window"),
    ("Gemma3TextConfig", {"use_bidirectional_attention": True, "sliding_window": 512}, "attend to later ones"),
    ("RobertaConfig", {"is_decoder": True, "pad_token_id": 2}, "other positions than forward"),
]


@pytest.mark.parametrize(("config_class", "options", "words"), REFUSED)
def test_models_that_are_no_plain_decoders_are_refused(
    open_cache: Open, config_class: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelRefused, match=words):
        open_cache(tiny_model(config_class, **options))


def remember(model: Any) -> None:
    """The model keeps more than K and V, and computes something else from a restored prefix."""
    embed, seen = model.model.embed_tokens.forward, [0.0]

    def forward(ids: torch.Tensor) -> torch.Tensor:
        hidden = embed(ids) + seen[0]
        seen[0] = 0.5 * ids.shape[1]
        return hidden

    model.model.embed_tokens.forward = forward


def look_ahead(model: Any) -> None:
    """Attention to later tokens, though the config does not say so."""
    embed = model.model.embed_tokens.forward
    model.model.embed_tokens.forward = lambda ids: embed(ids) + 0.1 * embed(ids[:, 20:]).sum(1, keepdim=True)


SPOILT: list[tuple[Callable[[Any], None], str]] = [
    (remember, "computes something else from a restored prefix"),
    (look_ahead, "attend to later ones|something else from a restored prefix"),
    (lambda model: setattr(model.model, "rope_deltas", None), "keeps positions of one call for the next"),
    # Each rank of tensor parallelism has some of the heads: under one `model_id` it would find another rank's.
    (lambda model: setattr(model, "_tp_size", 2), "divided among processes"),
    (lambda model: setattr(model.lm_head.weight, "device_mesh", "as a DTensor has"), "divided among processes"),
]


@pytest.mark.parametrize(("spoil", "words"), SPOILT)
def test_models_that_are_not_what_their_config_says_are_refused(
    open_cache: Open, spoil: Callable[[Any], None], words: str
) -> None:
    model = tiny_model("LlamaConfig")
    spoil(model)
    with pytest.raises(ModelRefused, match=words):
        open_cache(model, model_id="a model of this kind")


def test_the_affinity_query_says_what_restore_then_finds(open_cache: Open, daemon: tiercache.LaunchedDaemon) -> None:
    model, ids = tiny_model("LlamaConfig"), prompt(100)
    cache = open_cache(model, salt="s3cret")
    with tiercache.Client.connect(daemon.address, map_arena=False, request_timeout_s=30.0) as client:
        affinity = Affinity(client)

        def matched(name: str, salt: str = "s3cret") -> int | None:
            """None until the cache has announced the model."""
            with suppress(UnknownModel):
                return int(affinity.ask(Query(model=name, tokens=ids[0].tolist(), salt=salt))["matched"])
            return None

        wait_until(lambda: matched("LlamaForCausalLM") == 0)
        greedy(cache, ids, max_new_tokens=1)
        before = cache.watch.content.hex()
        assert (matched("LlamaForCausalLM"), matched(before), matched(before, salt="")) == (96, 96, 0)
        assert cache.restore(ids).known_tokens == 96
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
        assert cache.restore(ids).known_tokens == 0  # other weights, and another name
        after = cache.watch.content.hex()
        assert before != after
        wait_until(lambda: matched(after) == 0)
