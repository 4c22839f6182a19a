"""URLs of Valkey stores: what they say, and that no mistake in one shows the password."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.daemon.tiers.shared.stores.valkey import open_valkey
from tiercache.daemon.tiers.shared.stores.valkey.url import Place, read_url
from tiercache.errors import ConfigError

LOCAL = Place("localhost", 6379)


@pytest.mark.parametrize(
    ("url", "places", "address"),
    [
        ("valkey://localhost", (LOCAL,), "valkey://localhost:6379"),
        ("redis://10.0.0.1:7000/3", (Place("10.0.0.1", 7000),), "valkey://10.0.0.1:7000/3"),
        ("VALKEY://localhost/0", (LOCAL,), "valkey://localhost:6379"),
        ("rediss://localhost", (LOCAL,), "valkeys://localhost:6379"),
        ("valkey://[::1]:7000", (Place("::1", 7000),), "valkey://[::1]:7000"),
        ("valkey+cluster://a:1,b", (Place("a", 1), Place("b", 6379)), "valkey+cluster://a:1,b:6379"),
        ("valkeys+cluster://u:p@a:1", (Place("a", 1),), "valkeys+cluster://a:1"),
        ("unix:///run/v.sock", (Place("", 0, "/run/v.sock"),), "unix:///run/v.sock"),
        ("unix://u:p@/run/v%2Esock?db=2", (Place("", 0, "/run/v.sock"),), "unix:///run/v.sock?db=2"),
    ],
)
def test_places(url: str, places: tuple[Place, ...], address: str) -> None:
    settings = read_url(url)
    assert settings.places == places
    assert settings.address == address
    assert settings.cluster == ("cluster" in url)
    assert (settings.tls is not None) == url.startswith(("rediss", "valkeys"))


def test_parts() -> None:
    settings = read_url("valkey://us%65r:p%40ss:w%2Frd@localhost/7?connections=9")
    assert (settings.user, settings.password) == (b"user", b"p@ss:w/rd")
    assert (settings.database, settings.connections) == (7, 9)
    assert read_url("valkey://:p@localhost").user == b""
    assert read_url("unix:///s?db=5").database == 5
    store = open_valkey("valkey://localhost?connections=9")
    assert (store.connections, store.pack_blocks) == (9, 1)
    assert open_valkey("valkey://localhost").connections == 4


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("localhost:6379", "valkey://"),
        ("valkey+sentinel://localhost", "valkey+cluster://"),
        ("valkey://", "HOST"),
        ("valkey://:hunter2@", "HOST"),
        ("valkey://hunter2@localhost", ":password@"),
        ("valkey://:@localhost", "empty"),
        ("valkey://user:hunter2/x@localhost", "%2F"),
        ("valkey://user:hun?ter2@localhost", "%3F"),
        ("valkey://user:hun#ter2@localhost", "%23"),
        ("valkey://user:hunter2%@localhost", "%25"),
        ("valkey://user:hunter2%00@localhost", "%00"),
        ("valkey://user:hünter2@localhost", "percent-encoded"),
        ("valkey://user:hunter 2@localhost", "%20"),
        ("valkey://user:hunter2", "port"),
        ("valkey://localhost:0", "port"),
        ("valkey://localhost:65536", "port"),
        ("valkey://localhost:", "port"),
        ("valkey://local_host!", "HOST"),
        ("valkey://[::1", "brackets"),
        ("valkey://[nonsense]", "[::1]"),
        ("valkey://a,b", "valkey+cluster://"),
        ("valkey+cluster://a/1", "database 0"),
        ("valkey://localhost/x", "number"),
        ("valkey://localhost/1/2", "number"),
        ("valkey://localhost/9999999", "number"),
        ("valkey://localhost?db=1", "behind the host"),
        ("valkey://localhost?password=hunter2", "parameter 'password'"),
        ("valkey://localhost?connections=0", "from 1 to 64"),
        ("valkey://localhost?connections=many", "from 1 to 64"),
        ("valkey://localhost?connections=1&connections=2", "twice"),
        ("valkey://localhost?connections=", "VALUE"),
        ("valkey://localhost?ca=/etc/ca.pem", "valkeys://"),
        ("unix://run/v.sock", "absolute"),
        ("unix+cluster:///s", "valkey+cluster://"),
        ("unix:///" + "x" * 108, "107"),
        ("unix:///a%0Ab", "another path"),
        ("unix:///s?db=x", "from 0"),
        ("valkeys://localhost?ca=/nonexistent/ca.pem", "ca = /nonexistent/ca.pem"),
        ("valkeys://localhost?key=/nonexistent/key.pem", "cert=FILE"),
    ],
)
def test_mistakes(url: str, remedy: str) -> None:
    """One line that says what to do, and nothing of the password."""
    with pytest.raises(ConfigError) as caught:
        open_valkey(url)
    text = str(caught.value)
    assert remedy in text
    assert "\n" not in text
    assert "hunter2" not in text
    assert "ter2" not in text


SECRET = "zqxj"


@given(st.lists(st.sampled_from([*"@:/?#%&=,[]+ ", "%40", "%2", "host", "db=1", "6379", SECRET]), max_size=8))
def test_no_password_is_shown(pieces: list[str]) -> None:
    """Whatever stands around it."""
    for scheme in ("valkey", "unix", "valkey+cluster"):
        try:
            settings = read_url(f"{scheme}://user:{SECRET}{''.join(pieces)}@host")
            shown = settings.address + repr(settings)
        except ConfigError as error:
            shown = str(error)
        assert SECRET not in shown
