"""The URL of Mooncake's store, its codes, and what is said where its library is missing. Needs no Mooncake."""

from __future__ import annotations

import subprocess

import pytest

from tiercache.daemon.tiers.shared.stores import open_store
from tiercache.daemon.tiers.shared.stores.mooncake import codes, library
from tiercache.daemon.tiers.shared.stores.mooncake.settings import MooncakeSettings, parse_mooncake_url
from tiercache.daemon.tiers.shared.stores.store import Fate, StoreError, StoreProblem
from tiercache.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        ("mooncake://master", MooncakeSettings(master="master")),
        ("mooncake://10.0.0.5:1234/", MooncakeSettings(master="10.0.0.5", port=1234)),
        (
            "mooncake://m?protocol=rdma&device=mlx5_0,mlx5_1&segment=1GiB&buffer=20MiB&host=node-3.x&connections=2"
            "&metadata=http://h:8080/metadata",
            MooncakeSettings(
                master="m",
                protocol="rdma",
                device="mlx5_0,mlx5_1",
                segment_bytes=1 << 30,
                buffer_bytes=32 << 20,
                host="node-3.x",
                connections=2,
                metadata="http://h:8080/metadata",
            ),
        ),
        ("mooncake://m?segment=0", MooncakeSettings(master="m", segment_bytes=0)),
    ],
)
def test_a_url_is_read(url: str, settings: MooncakeSettings) -> None:
    assert parse_mooncake_url(url) == settings


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("mooncake://", "is no name or IPv4 address of a master"),
        ("mooncake://[::1]:5", "is no name or IPv4 address of a master"),
        ("mooncake://u:secret-word@m", "Mooncake knows no users and passwords"),
        ("mooncake://m:0", "'0' is no port"),
        ("mooncake://m:99999", "'99999' is no port"),
        ("mooncake://m/bucket", "has nothing behind the port but settings"),
        ("mooncake://m?size=1GiB", "'size' is no setting of this store: write protocol, device"),
        ("mooncake://m?protocol=ib", "must be tcp or rdma"),
        ("mooncake://m?device=mlx5_0", "device is for protocol=rdma"),
        ("mooncake://m?segment=1MiB", "must be 16MiB to 16TiB"),
        ("mooncake://m?buffer=0", "must be 16MiB to 16TiB"),
        ("mooncake://m?host=a%20b", "is not understood: write for example node-3"),
        ("mooncake://m?metadata=nonsense", "is not understood: write for example P2PHANDSHAKE"),
    ],
)
def test_a_mistake_in_a_url_is_told(url: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_mooncake_url(url)
    assert says in str(caught.value)
    assert "secret-word" not in str(caught.value)


@pytest.mark.parametrize(
    ("stderr", "says"),
    [
        ("Traceback\nModuleNotFoundError: No module named 'mooncake'\n", "needs Mooncake's client: "),
        ("ImportError: libibverbs.so.1: cannot open shared object file\n", "install libibverbs1, librdmacm1"),
        ("", "cannot be loaded (status 1)"),
    ],
)
def test_a_missing_library_is_told(stderr: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.CompletedProcess([], 1, "", stderr)
    monkeypatch.setattr(library.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(ConfigError) as caught:
        open_store("mooncake://m")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_codes_are_fates_or_failures() -> None:
    assert [codes.fate_of_read(code, 10) for code in (10, 3, 11, codes.INVALID, 0, -704, -800)] == [
        *(Fate.DONE, Fate.DONE, Fate.MISFIT, Fate.MISFIT),
        *(Fate.MISSING, Fate.MISSING, Fate.MISSING),
    ]
    assert [codes.fate_of_write(code) for code in (0, codes.INVALID, -706, -800)] == [Fate.DONE, *[Fate.REFUSED] * 3]
    problems = {
        -200: StoreProblem.FULL,
        -900: StoreProblem.UNREACHABLE,
        -901: StoreProblem.TIMEOUT,
        -1: StoreProblem.PROTOCOL,
    }
    for code, problem in problems.items():
        with pytest.raises(StoreError) as caught:
            codes.fate_of_write(code)
        assert caught.value.problem is problem
