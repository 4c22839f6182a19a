"""How the blocks of a vLLM engine are named, without vLLM: while weights are read, and when files change."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_vllm import SIZE, SPEC
from waiting import wait_until

from tiercache.connectors.vllm import names as naming
from tiercache.connectors.vllm.names import Names, check_hashes
from tiercache.connectors.weights import files
from tiercache.errors import ModelRefused
from tiercache.protocol.messages import ModelCard

LONG_S = 600.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def names_of(
    folder: Path,
    wait_s: float = LONG_S,
    more: dict[str, Any] | None = None,
    model_id: str = "",
    configs: dict[str, Any] | None = None,
    **options: Any,
) -> Names:
    """`options` are of vLLM's model_config, `configs` the other configs."""
    fields: dict[str, Any] = {
        "model": str(folder),
        "revision": None,
        "dtype": "float32",
        "quantization": None,
        "hf_config": config_of(folder),
        **options,
    }
    model = SimpleNamespace(**fields)
    config = SimpleNamespace(
        model_config=model,
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    vars(config).update(configs or {})
    return Names(config, model_id, "", wait_s=wait_s, **(more or {}))


def loading(load_format: str, **extra: Any) -> SimpleNamespace:
    return SimpleNamespace(load_format=load_format, model_loader_extra_config=extra)


def config_of(folder: Path, layers: int = 4) -> Any:
    return SimpleNamespace(to_dict=lambda: {"layers": layers, "_name_or_path": str(folder)})


def adapter(folder: Path, number: int, **options: Any) -> Any:
    options = {"load_inplace": False, **options}
    return SimpleNamespace(lora_name="a", lora_int_id=number, lora_path=str(folder), **options)


def test_requests_wait_for_the_model_but_no_longer_than_they_may(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, waits = 100.0, []
    monkeypatch.setattr(naming, "time", SimpleNamespace(monotonic=lambda: now_s))
    names = names_of(folder, wait_s=60.0)
    named = threading.Event()
    event = SimpleNamespace(set=named.set, wait=lambda seconds: waits.append(seconds) or named.is_set())
    monkeypatch.setattr(names, "_named", event)
    for now_s in (100.0, 130.0, 161.0):  # noqa: B007
        assert names.root() == b""
    assert waits == [60.0, 30.0, 0.0]
    names.read_model()
    assert len(names.root()) == 16


def test_an_adapter_is_its_content_when_it_was_loaded(folder: Path, tmp_path: Path) -> None:
    names = names_of(folder)
    names.read_model()
    place = tmp_path / "adapter"
    place.mkdir()
    weights = place / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    first = names.root(adapter(place, 1))
    assert len({first, names.root(), b""}) == 3
    assert names.root(adapter(place, 1)) == names.root(adapter(place, 2)) == first
    weights.write_bytes(b"two")
    os.utime(weights, ns=(1, 1))
    assert names.root(adapter(place, 1)) == b"", "vLLM has the old one, or the new one"
    second = names.root(adapter(place, 3))
    assert second not in (b"", first)
    assert names.root(adapter(place, 1, load_inplace=True)) == second
    assert names.root(adapter(place, 2)) == b""


def test_an_adapter_that_is_used_in_another_way_is_another_one(folder: Path) -> None:
    roots, plain = set(), set()
    for used in ({}, {"target_modules": ["v_proj"]}, {"lora_dtype": "float16"}, {"enable_moe_shared_loras": True}):
        names = names_of(folder, configs={"lora_config": SimpleNamespace(**used)})
        names.read_model()
        roots |= {names.root(adapter(folder, 1)), names.root(adapter(folder, 2, is_3d_lora_weight=True))}
        plain.add(names.root())
    assert (len(roots), len(plain)) == (8, 1)


def test_what_changes_kv_besides_weights_is_in_the_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def root(**options: Any) -> bytes:
        names = names_of(folder, **options)
        names.read_model()
        return names.root()

    media, roots = SimpleNamespace(mm_processor_kwargs={"max_pixels": 4096}), [root()]
    for options in (
        {"hf_config": config_of(folder, layers=5)},
        {"dtype": "bfloat16"},
        {"quantization": "fp8"},
        {"quantization_config": {"linear": "int8"}},
        {"model_impl": "transformers"},
        {"override_generation_config": {"attn_temperature_tuning": True}},
        {"multimodal_config": media},
        {"trust_remote_code": True, "more": {"x": 1}},
        {"configs": {"load_config": loading("pt")}},
        {"configs": {"load_config": loading("auto", pattern="of other files")}},
        {"configs": {"speculative_config": SimpleNamespace(draft_load_config=loading("pt"))}},
        {"configs": {"attention_config": SimpleNamespace(use_prefill_query_quantization=True)}},
        {"configs": {"attention_config": SimpleNamespace(disable_flashinfer_q_quantization=True)}},
        {"configs": {"kernel_config": SimpleNamespace(moe_backend="marlin")}},
        {"configs": {"kernel_config": SimpleNamespace(linear_backend_per_quant={"nvfp4": "marlin"})}},
        {"multimodal_config": SimpleNamespace(video_pruning_method="vidcom2")},
    ):
        roots.append(root(**options))
    (folder / "modeling.py").write_text("scale = 2")
    assert root() == roots[0], "the code is not used"
    roots += [root(trust_remote_code=True)]
    for name in (
        "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
        "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
        "VLLM_USE_DEEP_GEMM_E8M0",
        "VLLM_ROCM_USE_AITER_FP4BMM",
        "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    ):
        monkeypatch.setenv(name, "1")
        roots += [root()]
    assert len(set(roots)) == len(roots)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"calculate_kv_scales": True}, "calculate_kv_scales"),
        ({"prefix_caching_hash_algo": "xxhash"}, "set it to sha256"),
        ({"enable_prefix_caching": False}, "prefix caching is off"),
    ],
)
def test_what_is_of_its_own_in_each_process_is_refused(options: dict[str, Any], words: str) -> None:
    fields = {"prefix_caching_hash_algo": "sha256", "enable_prefix_caching": True, "calculate_kv_scales": False}
    check_hashes(SimpleNamespace(cache_config=SimpleNamespace(**fields)))
    with pytest.raises(ModelRefused, match=words):
        check_hashes(SimpleNamespace(cache_config=SimpleNamespace(**{**fields, **options})))
    hisparse = SimpleNamespace(hisparse_config=object())
    with pytest.raises(ModelRefused, match="HiSparse"):
        check_hashes(SimpleNamespace(cache_config=SimpleNamespace(**fields), attention_config=hisparse))


def test_what_changes_while_it_is_read_has_no_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM may have loaded what was there before."""
    place = tmp_path / "adapter"
    place.mkdir()
    (place / "adapter_model.safetensors").write_bytes(b"adapter")
    names = names_of(folder)
    names.read_model()
    read = files.fingerprint_files

    def change(files: list[Path]) -> str:
        for file in files:
            file.with_suffix(".new").write_bytes(b"others!")
            file.with_suffix(".new").replace(file)
        return str(read(files))

    monkeypatch.setattr(files, "fingerprint_files", change)
    assert names.root(adapter(place, 1)) == b""
    with pytest.raises(ModelRefused, match="have changed while they were read"):
        names_of(folder).read_model()
    monkeypatch.undo()
    assert names.root(adapter(place, 1)) == b"", "it stays unknown which one vLLM has"
    assert names.root(adapter(place, 2)) != b""


@pytest.mark.parametrize("draft", [False, True])
def test_weights_from_elsewhere_need_a_model_id(folder: Path, draft: bool) -> None:
    load = loading("tensorizer", tensorizer_uri="s3://weights")
    configs = {"speculative_config": SimpleNamespace(draft_load_config=load)} if draft else {"load_config": load}
    with pytest.raises(ModelRefused, match=r"with load_format tensorizer .*: set model_id"):
        names_of(folder, configs=configs).read_model()
    names = names_of(folder, configs=configs, model_id="step 100")
    names.read_model()
    assert names.root()


def test_a_model_that_cannot_be_read_in_any_way_is_served_without_the_cache(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise KeyError("layers")

    names = names_of(folder, wait_s=0.0, hf_config=SimpleNamespace(to_dict=fail))
    names.read_later("vLLM")
    wait_until(lambda: "vLLM is served without the cache" in caplog.text)
    assert "KeyError: 'layers'" in caplog.text
    assert names.root() == b""


def test_cards_are_announced_when_they_change_and_the_oldest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(naming, "MAX_CARDS", 2)
    announced: list[list[ModelCard]] = []
    connector: Any = SimpleNamespace(namespace=SPEC, announce=announced.append)
    model = SimpleNamespace(model="/models/m", served_model_name=["served", "m"])
    config = SimpleNamespace(model_config=model, cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"))
    its = naming.Cards(config, connector, [SPEC], 2 * SIZE)
    for content, adapter in ((b"1", ""), (b"1", ""), (b"1", "a"), (b"2", ""), (b"2", "b"), (b"1", "a")):
        its.add(content, adapter, f"/{adapter}")
    assert [[(card.content, card.adapter) for card in every] for every in announced] == [
        [(b"1", "")],
        [(b"1", ""), (b"1", "a")],
        [(b"1", "a"), (b"2", "")],
        [(b"2", ""), (b"2", "b")],
        [(b"2", "b"), (b"1", "a")],
    ]
    [card] = announced[0]
    assert (card.names, card.namespaces, card.block_size) == (["served", "m", "/models/m"], [SPEC.fingerprint()], SIZE)
    assert (card.hashing, card.hash_size) == ("vllm/sha256", 2 * SIZE)
