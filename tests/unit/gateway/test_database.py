"""Gateways that start at once share databases that do not exist yet."""

from __future__ import annotations

import multiprocessing
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from gateway.auth.key_store import KeyStore
from runtime.errors import ConfigError

NUM_PROCESSES = 4
NUM_ROUNDS = 40


def _open(urls: list[str], together: Barrier, failures: Queue[str]) -> None:
    for url in urls:
        together.wait()
        try:
            KeyStore(url).close()
        except ConfigError as error:
            failures.put(str(error))
    failures.put("")


def test_processes_that_start_at_once_make_one_database(tmp_path: Path) -> None:
    # Not forked: a lock that another thread of this process holds would stay locked there.
    context = multiprocessing.get_context("spawn")
    together, failures = context.Barrier(NUM_PROCESSES), context.Queue()
    urls = [f"sqlite:///{tmp_path}/{number}.sqlite" for number in range(NUM_ROUNDS)]
    arguments = (urls, together, failures)
    processes = [context.Process(target=_open, args=arguments, daemon=True) for _ in range(NUM_PROCESSES)]
    for process in processes:
        process.start()
    found = []
    num_done = 0
    while num_done < NUM_PROCESSES:
        failure = failures.get()
        num_done += not failure
        found += [failure] if failure else []
    for process in processes:
        process.join()
    assert found == []


def test_a_database_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "keys.sqlite"
    file.write_bytes(b"this is no database" * 100)
    with pytest.raises(ConfigError, match=r"keys\.store"):
        KeyStore(f"sqlite:///{file}")
