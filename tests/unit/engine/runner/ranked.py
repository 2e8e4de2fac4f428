"""Runners of several ranks, for tests: how one is opened, and fixtures by which nothing of it stays.

A rank has its part from a process that packs it, or finds it packed; and is a process that imports all it
needs. Here it finds it, and is forked, since the other ways cost imports at each start; tests of real engines
(`test_lost_ranks`) have those.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.config import PackedWeightsConfig, ParallelConfig
from engine.model import kept_weights, loader
from engine.model.checkpoint import LoadRequest
from engine.model.kept_weights import KeptWeights
from engine.model.spec import CheckpointError
from engine.runner.ranks import group as rank_group
from engine.runner.ranks.group import RankGroup
from engine.runner.runner import ModelRunner
from kernels.native.library import NativeLibrary, load_native
from tests.unit.engine.forked import forking_subprocess, running_ranks
from tests.unit.engine.runner.driver import open_runner


@pytest.fixture
def no_rank_stays() -> Iterator[None]:
    """Ranks end with their runner; what they share has no name and goes with them."""
    before, num_before = _shared_memory(), _num_maps()
    # What other tests left is not looked through: of a whole stage that takes seconds.
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()
    assert not running_ranks()
    assert _shared_memory() <= before
    assert _num_maps() <= num_before


def _num_maps() -> int:
    """Descriptors of memory that ranks share."""
    return sum("millrace-ranks" in link for link in _open_files())


def _shared_memory() -> set[str]:
    """Names of it that ranks or this process's libraries made: whatever else runs here makes others."""
    own = f"_{os.getpid()}_"
    return {each for each in os.listdir("/dev/shm") if each.startswith("millrace-ranks") or own in each}


def _open_files() -> list[str]:
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue
    return found


@pytest.fixture(scope="module")
def packed_parts(tmp_path_factory: pytest.TempPathFactory) -> PackedWeightsConfig:
    """Where the parts of ranks are kept."""
    return PackedWeightsConfig(path=str(tmp_path_factory.mktemp("packed")), min_bytes=0)


@pytest.fixture
def parts_are_kept(monkeypatch: pytest.MonkeyPatch, packed_parts: PackedWeightsConfig) -> None:
    """Before a rank is told what to load, that is packed in this process, which has torch. It is forked."""
    request_of = RankGroup._request

    def received(request: LoadRequest, library: NativeLibrary, progress: Any) -> loader.Received:
        ours, theirs = Pipe()

        def serve() -> None:
            # An error there ends the wait here.
            with theirs:
                loader._serve(theirs)

        thread = threading.Thread(target=serve, daemon=True)
        with ours:
            thread.start()
            ours.send((library.level, request))
            found = loader._receive_model(ours, library, progress)
            thread.join()
        return found

    def packed_before(group: RankGroup, request: LoadRequest, rank: int) -> LoadRequest:
        own = request_of(group, request, rank)
        if rank:
            own = msgspec.structs.replace(
                own, config=msgspec.structs.replace(own.config, packed_weights=packed_parts)
            )
            kept = KeptWeights(packed_parts)
            with contextlib.suppress(CheckpointError):
                kept.load(own, load_native(), lambda stage, part: None)
            written = kept.write_later()
            if written is not None:
                written.join()
        return own

    monkeypatch.setattr(kept_weights, "receive_in_subprocess", received)
    monkeypatch.setattr(RankGroup, "_request", packed_before)
    monkeypatch.setattr(rank_group, "subprocess", forking_subprocess())


def shared(folder: Path, tensor: int = 2, expert: int = 1, pipeline: int = 1, **options: Any) -> ModelRunner:
    """A runner of so many ranks, of a thread each unless they are asked for more."""
    parallel = ParallelConfig(tensor=tensor, expert=expert, pipeline=pipeline)
    options = {"num_threads": parallel.degrees.size, "parallel": parallel} | options
    return open_runner(folder, native="required", **options)
