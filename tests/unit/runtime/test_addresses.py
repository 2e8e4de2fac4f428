"""Addresses as they are written."""

from __future__ import annotations

import pytest

from runtime.addresses import is_this_machine, join


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("gateway", False),
        ("", False),
    ],
)
def test_only_loopback_is_this_machine(host: str, expected: bool) -> None:
    assert is_this_machine(host) is expected


@pytest.mark.parametrize(("host", "text"), [("a", "a:1"), ("10.0.0.1", "10.0.0.1:1"), ("::1", "[::1]:1")])
def test_addresses_of_ipv6_are_written_in_brackets(host: str, text: str) -> None:
    assert join(host, 1) == text
