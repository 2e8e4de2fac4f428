"""The state file, and how commands find the stack."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from runtime.errors import ConfigError
from services.cli.target import find_target
from services.supervisor.state import (
    FILE_NAME,
    ProcessState,
    RunState,
    own_create_time,
    read_state,
    remove_state,
    require_none_running,
    write_state,
)


@pytest.fixture
def state() -> RunState:
    return RunState(
        pid=os.getpid(),
        pid_created_unix_s=own_create_time(),
        address="127.0.0.1:8080",
        api_key="k",
        model="tiny",
        trace_store="traces.sqlite",
        processes=(ProcessState(name="engine-0", pid=1, addresses={"grpc": "127.0.0.1:1"}),),
    )


def test_round_trip_for_the_owner_only(tmp_path: Path, state: RunState) -> None:
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state
    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    remove_state(tmp_path)
    remove_state(tmp_path)
    assert read_state(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": "x"}'])
def test_broken_file_counts_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert read_state(tmp_path) is None


def test_file_of_a_dead_supervisor_counts_as_none(tmp_path: Path, state: RunState) -> None:
    # The process id lives, but belongs to a process that started at another time.
    write_state(tmp_path, msgspec.structs.replace(state, pid_created_unix_s=1.0))
    assert read_state(tmp_path) is None
    require_none_running(tmp_path)


def test_second_stack_is_refused_with_the_remedy(tmp_path: Path, state: RunState) -> None:
    write_state(tmp_path, state)
    with pytest.raises(ConfigError, match=r"already runs on 127\.0\.0\.1:8080 .*MILLRACE_STATE_DIR"):
        require_none_running(tmp_path)


def test_commands_find_the_running_stack(tmp_path: Path, state: RunState) -> None:
    environ = {"MILLRACE_STATE_DIR": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"no running stack found.*make serve"):
        find_target("", environ)
    write_state(tmp_path, state)
    target = find_target("", environ)
    assert (target.address, target.api_key, target.model) == ("127.0.0.1:8080", "k", "tiny")
    assert target.url == "http://127.0.0.1:8080"
    assert find_target("", {**environ, "MILLRACE_API_KEY": "other"}).api_key == "other"


@pytest.mark.parametrize(
    ("url", "address", "whole"),
    [
        ("http://example:9000", "example:9000", "http://example:9000"),
        ("https://example:9000/v1", "example:9000", "https://example:9000/v1"),
        ("example:9000", "example:9000", "http://example:9000"),
        ("example", "example:8080", "http://example:8080"),
        ("http://[::1]:9000", "[::1]:9000", "http://[::1]:9000"),
    ],
)
def test_a_named_server_wins(tmp_path: Path, state: RunState, url: str, address: str, whole: str) -> None:
    write_state(tmp_path, state)
    environ = {"MILLRACE_STATE_DIR": str(tmp_path), "MILLRACE_API_KEY": "k2"}
    assert find_target(url, environ).address == address
    target = find_target("", {**environ, "MILLRACE_URL": url})
    assert (target.address, target.api_key, target.url) == (address, "k2", whole)
