"""What obstore raises, in words: its texts are those of obstore 0.12, shortened."""

from __future__ import annotations

import pytest

from tiercache.daemon.tiers.shared.stores.objects.settings import parse_object_url
from tiercache.daemon.tiers.shared.stores.objects.troubles import object_store_error
from tiercache.daemon.tiers.shared.stores.store import StoreProblem

ATTEMPT = "Generic S3 error: Error performing {verb} http://127.0.0.1:1/kvb/p/{name} in {ms}ms, after 1 retries, "
FIRST = ATTEMPT + "max_retries: 1, retry_timeout: 3s  - HTTP error: error sending request"
SOURCES = {
    "Connection refused": """ConnectError( "tcp connect error", 127.0.0.1:1,
        Os { code: 111, kind: ConnectionRefused, message: "Connection refused", }, )""",
    "failed to lookup address information: Name or service not known": """ConnectError( "dns error",
        Custom { kind: Uncategorized,
            error: "failed to lookup address information: Name or service not known", }, )""",
    "its certificate is of a CA that this host does not trust": """Custom { kind: Other,
        error: Custom { kind: InvalidData, error: InvalidCertificate(
            UnknownIssuer, ), }, }""",
    "HTTP error: error sending request": "",
}


@pytest.mark.parametrize("cause", SOURCES)
def test_one_cause_is_one_text_whatever_was_asked_and_however_long_it_took(cause: str) -> None:
    settings = parse_object_url("s3://kvb/p?endpoint=http://127.0.0.1:1")
    texts = set()
    for verb, name, ms in (("GET", "notes/a", "20.7"), ("PUT", "values/b-9f", "21.66")):
        first = FIRST.format(verb=verb, name=name, ms=ms)
        error = object_store_error(settings, Exception(f"{first}\n\nDebug source:\n{SOURCES[cause]}"))
        assert error.problem is StoreProblem.UNREACHABLE
        texts.add(error.text)
    [text] = texts
    assert text.startswith(f"s3://kvb/p: {cause}: ")
