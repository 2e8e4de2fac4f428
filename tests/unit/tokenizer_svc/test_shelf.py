"""Several checkpoints in one service: one that cannot be loaded is refused by its name, the others serve."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from millrace.tokenizer.v1 import tokenizer_pb2

from contract.errors import MillraceError, Reason
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from runtime.models import Models
from tokenizer_svc.service.shelf import Served, Shelf


class Nothing:
    """Stands for what a checkpoint's requests need; knows whether it was closed."""

    num_waiting = 0

    def __init__(self) -> None:
        self.closed = False

    async def close(self) -> None:
        self.closed = True


class Loader:
    """Loads what is not in `broken`."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.num_loads = 0

    async def __call__(self, model: ModelConfig) -> Served:
        self.num_loads += 1
        if model.path in self.broken:
            raise ConfigError(f"{model.path}: not a tokenizer")
        vocabulary = tokenizer_pb2.GetVocabularyResponse(fingerprint=model.path)
        preparer: Any = type("Preparer", (), {"close": lambda self: None})()
        return Served(model, preparer, vocabulary, cast("Any", Nothing()))


def models(**paths: str) -> Models:
    named = {name.replace("_", "@"): path for name, path in paths.items()}
    return Models(models={name: ModelConfig(name=name, path=path) for name, path in named.items()})


async def test_one_that_cannot_be_loaded_is_refused_by_name_until_it_can_be() -> None:
    loader = Loader()
    loader.broken = {"/bad"}
    shelf = Shelf(loader)
    await shelf.start(models(good="/good", bad="/bad"))
    assert shelf.find("good").fingerprint == "/good"
    with pytest.raises(MillraceError) as refused:
        shelf.find("bad")
    assert refused.value.reason is Reason.TOKENIZER_UNAVAILABLE
    assert "'bad' cannot be served: /bad: not a tokenizer" in refused.value.message
    with pytest.raises(MillraceError, match="'other' is not served; ask for 'good', 'bad'"):
        shelf.find("other")
    # With several, nobody's name is none.
    with pytest.raises(MillraceError):
        shelf.find("")
    loader.broken.clear()
    while True:
        try:
            assert shelf.find("bad").fingerprint == "/bad"
            break
        except MillraceError:
            await asyncio.sleep(0.05)
    await shelf.close()


async def test_nothing_that_can_be_loaded_ends_the_start() -> None:
    loader = Loader()
    loader.broken = {"/bad"}
    with pytest.raises(ConfigError, match="/bad: not a tokenizer"):
        await Shelf(loader).start(models(bad="/bad"))


async def test_a_version_that_is_replaced_is_found_by_its_own_name_for_a_while() -> None:
    loader = Loader()
    shelf = Shelf(loader)
    old = ModelConfig(name="chat", path="/old", revision="1")
    new = ModelConfig(name="chat", path="/new", revision="2")
    await shelf.start(Models(models={"chat": old}))
    assert shelf.find("").fingerprint == "/old"
    await shelf.apply(Models(models={"chat": new}))
    assert shelf.find("chat").fingerprint == "/new"
    assert (shelf.find("chat@1").fingerprint, shelf.find("chat@2").fingerprint) == ("/old", "/new")
    # Another alias alone leaves the checkpoint as it is, so nothing is loaded.
    renamed = ModelConfig(name="chat", path="/new", revision="2", aliases=("talk",))
    await shelf.apply(Models(models={"chat": renamed}))
    assert shelf.find("talk").fingerprint == "/new"
    assert loader.num_loads == 2
    await shelf.close()
