"""Quantities in texts for people."""

from __future__ import annotations

import pytest

from tiercache.ground.units import without_quantities


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("it has hung for 34 s", "it has hung for N s"),
        ("in 20.79ms, after 3 retries", "in Nms, after N retries"),
        ("196.3 MiB available, 16.0 MiB of it kept free", "N MiB available, N MiB of it kept free"),
        ("90% of 12 clients", "N% of N clients"),
        ("nvme directory /mnt/nvme0/kv: /mnt/1 is full", "nvme directory /mnt/nvme0/kv: /mnt/1 is full"),
        ("http://10.0.0.5:9000: HTTP 503: busy", "http://10.0.0.5:9000: HTTP 503: busy"),
        ("its process ended with status -9", "its process ended with status -9"),
        ("another daemon (pid 123) has it", "another daemon (pid 123) has it"),
    ],
)
def test_one_cause_is_one_text_and_two_causes_are_two(text: str, kind: str) -> None:
    assert without_quantities(text) == kind
