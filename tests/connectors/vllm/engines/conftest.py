"""Real vLLM engines over a real daemon. Only collected where vLLM is installed: see `make test-vllm`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import vllm_stand_in

import tiercache

if vllm_stand_in.INSTALLED:
    from vllm_engines import Engine, flush, launch, offloading_config, save_model

    @pytest.fixture(scope="session")
    def model(tmp_path_factory: pytest.TempPathFactory) -> str:
        return save_model(tmp_path_factory.mktemp("model"))

    @pytest.fixture(scope="session")
    def daemon() -> Iterator[tiercache.LaunchedDaemon]:
        with launch("256MiB", region="64MiB", quota="team=2MiB") as daemon:
            yield daemon

    @pytest.fixture(scope="session")
    def plain(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
        """An engine without a connector, whose tokens are the right ones."""
        engine = Engine(model, tmp_path_factory.mktemp("plain") / "log")
        yield engine
        engine.close()

    @pytest.fixture(scope="session")
    def shared(
        model: str, daemon: tiercache.LaunchedDaemon, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Engine]:
        engine = Engine(model, tmp_path_factory.mktemp("shared") / "log", daemon.address)
        yield engine
        engine.close()

    @pytest.fixture
    def engine(shared: Engine, daemon: tiercache.LaunchedDaemon) -> Engine:
        """An engine with the connector; it and the daemon have forgotten everything."""
        shared.forget()
        flush(daemon)
        return shared

    @pytest.fixture(scope="session")
    def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Where the daemons of many tests live, one after another."""
        return tmp_path_factory.mktemp("run") / "d"

    @pytest.fixture(scope="session")
    def enduring(model: str, run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
        """An engine that lives through all daemons at `run_dir`. There is none at its start."""
        settings = {"request_timeout_s": 0.5}
        engine = Engine(model, tmp_path_factory.mktemp("enduring") / "log", str(run_dir), settings)
        yield engine
        engine.close()

    @pytest.fixture(scope="session")
    def offloading(model: str, run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
        """The same, with vLLM's own offloading between it and the daemons."""
        config = offloading_config({"address": str(run_dir), "request_timeout_s": 2.0, "tenant": "offload"})
        engine = Engine(model, tmp_path_factory.mktemp("offloading") / "log", kv_transfer_config=config)
        yield engine
        engine.close()

    @pytest.fixture
    def start(model: str, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
        """Starts engines of a test's own."""
        with ExitStack() as stack:

            def make(*arguments: Any, **options: Any) -> Engine:
                options.setdefault("model", model)
                engine = Engine(
                    options.pop("model"), tmp_path / f"log{len(list(tmp_path.iterdir()))}", *arguments, **options
                )
                stack.callback(engine.close)
                return engine

            yield make
