"""The page's files: served by this port alone, and free of what its policy forbids."""

from __future__ import annotations

import re
import urllib.request

from http_helpers import TIMEOUT_S, request

from tiercache.http.page import FOLDER


def test_the_page_is_of_this_port_alone(url: str) -> None:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        page, policy = answer.read().decode(), answer.headers["Content-Security-Policy"]
    assert request(f"{url}/dashboard").text == page
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    named = re.findall(r'(?:src|href)="(/static/[^"]+)"', page)
    assert len(named) >= 4
    assert {request(url + path).status for path in named} == {200}


def test_files_have_what_the_policy_allows() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/)", text), path
        assert "innerHTML" not in text, path
        if path.suffix == ".html":
            assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", text), path
