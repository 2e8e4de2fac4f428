"""Which key a command sends where."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.target import find_target


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_this_machines_stacks_get_the_development_key(host: str, tmp_path: Path) -> None:
    environ = {"MILLRACE_STATE_DIR": str(tmp_path), "MILLRACE_DEV_KEY": "mr-own"}
    assert find_target(f"http://{host}:8080", environ).api_key == "mr-own"


@pytest.mark.parametrize(
    "url", ["https://api.example.com", "http://10.0.0.7:8000", "127.0.0.1.example.com:80"]
)
def test_another_machine_gets_a_key_only_when_one_is_named(url: str, tmp_path: Path) -> None:
    environ = {"MILLRACE_STATE_DIR": str(tmp_path), "MILLRACE_DEV_KEY": "mr-own"}
    target = find_target(url, environ)
    assert target.api_key == ""
    assert target.metadata == ()
    named = find_target(url, {**environ, "MILLRACE_API_KEY": "sk-theirs"})
    assert named.metadata == (("authorization", "Bearer sk-theirs"),)


def test_https_has_its_own_port(tmp_path: Path) -> None:
    environ = {"MILLRACE_STATE_DIR": str(tmp_path)}
    assert find_target("https://api.example.com", environ).address == "api.example.com:443"
    assert find_target("http://api.example.com", environ).address == "api.example.com:8080"
