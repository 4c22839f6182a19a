"""Names of values as names of files, and what is wrong with URLs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tiercache.daemon.tiers.shared.stores.folder.settings import parse_folder_url
from tiercache.daemon.tiers.shared.stores.names import fan_out, file_name
from tiercache.daemon.tiers.shared.stores.objects.settings import parse_object_url
from tiercache.errors import ConfigError

ROOT = Path(__file__).resolve().parents[5]
NAMES = [
    b"tc1:default:5d1e0b3a:0a1b2c3d:9f",
    b"tc1+default:5d1e0b3a:0a1b2c3d:9f",
    b"tc1%3Adefault",
    b"tc1:default",
    b"..",
    b".",
    b"",
    b"a/b",
    b"../../etc/passwd",
    b"a\0b",
    b"\xff\xfe",
    b"x" * 200,
    b"x" * 201,
    b"x" * 5000,
    b"=" + b"0" * 48,
]


def test_names_of_files_are_safe_and_differ() -> None:
    files = [file_name(name) for name in NAMES]
    assert len(set(files)) == len(NAMES)
    for file in files:
        assert re.fullmatch(r"[A-Za-z0-9_%+=-][A-Za-z0-9_%+=.-]{0,199}", file)
    assert file_name(NAMES[0]) == "tc1+default+5d1e0b3a+0a1b2c3d+9f", "hosts of all versions agree on it"
    assert fan_out(NAMES[0]) == "5de"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file://kv", "no absolute path"),
        ("file:///", "names no folder"),
        ("file:///mnt/../etc", "not a plain path"),
        ("file:///mnt/kv?sise=1", "'sise' is not a setting of this store: write size, ttl"),
        ("file:///mnt/kv?size=much", "size = much"),
        ("file:///mnt/kv?size=10", "must be 1MiB or more"),
        ("file:///mnt/kv?ttl=1s", "must be 1min to 3650d"),
        ("file:///mnt/kv?direct=maybe", "must be yes or no"),
        ("file:///mnt/kv?connections=0", "from 1 to 64"),
        ("s3://", "'' is not a name of a bucket"),
        ("s3://a_b!c/x", "is not a name of a bucket"),
        ("s3://bucket/../x", "single slashes"),
        ("s3://bucket?endpoint=10.0.0.5:9000", "write for example http://10.0.0.5:9000"),
        ("s3://bucket?endpoint=http://me:secret@host", "is not an address of a server"),
        ("s3://bucket?pack=0", "from 1 to 256"),
        ("s3://bucket?region=eu/1", "is not understood"),
        ("s3://bucket?addressing=wild", "path or virtual"),
        ("s3://bucket?ca=our.pem", "is not an absolute path"),
        ("s3://bucket?endpoint=http://host&ca=/our.pem", "ca= is for TLS"),
        ("gs://bucket?region=eu", "'region' is not a setting"),
        ("s3://key:hush@bucket/prefix", "AWS_ACCESS_KEY_ID"),
        ("gs://key:hush@bucket/prefix", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az://key:hush@bucket/prefix", "AZURE_STORAGE_ACCOUNT_KEY"),
    ],
)
def test_a_wrong_url_is_refused_in_one_line_without_its_secret(url: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        (parse_folder_url if url.startswith("file") else parse_object_url)(url)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "hush" not in str(caught.value)


def test_the_urls_of_the_documents_are_understood() -> None:
    documents = "".join((ROOT / "daemon" / name).read_text() for name in ("OPERATING.md", "deploy/README.md"))
    found = set(re.findall(r"`((?:file|s3|gs|az)://[^`]{2,})`", documents))
    assert len(found) >= 3
    for url in found:
        (parse_folder_url if url.startswith("file") else parse_object_url)(url)


def test_a_url_of_a_folder_says_all_there_is() -> None:
    settings = parse_folder_url("file:///mnt/my%20kv/?size=10TiB&ttl=2d&direct=no&sync=yes&connections=8")
    assert (settings.path, settings.size_bytes, settings.ttl_s) == ("/mnt/my kv", 10 << 40, 2 * 86400)
    assert (settings.direct, settings.sync, settings.connections) == (False, True, 8)


def test_a_url_of_a_bucket_says_all_there_is() -> None:
    settings = parse_object_url("s3://bucket/a/b/?endpoint=http://10.0.0.5:9000/&pack=4&connections=2")
    assert settings.address == "s3://bucket/a/b"
    assert settings.config == {"endpoint": "http://10.0.0.5:9000", "region": "us-east-1"}
    assert (settings.allow_http, settings.pack_blocks, settings.connections) == (True, 4, 2)
    assert parse_object_url("s3://bucket").pack_blocks == 16
    assert parse_object_url("az://blocks/x?account=mine").config == {"account_name": "mine"}
