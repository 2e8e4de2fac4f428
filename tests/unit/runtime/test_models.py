"""What is served: every mistake is refused by the key that holds it, and a changed file is followed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from runtime.config import read_tables
from runtime.errors import ConfigError
from runtime.models import Source, load_models, own_model, replaced

TWO: dict[str, Any] = {"chat@1": {"path": "a"}, "chat@2": {"path": "b", "aliases": ["new"]}}


def test_one_model_is_several_of_which_there_is_one() -> None:
    alone = load_models({"model": {"path": "x/tiny", "aliases": ["small"]}})
    assert list(alone.models) == ["tiny"]
    assert alone.models["tiny"].names == {"tiny", "small"}
    assert alone.models["tiny"].key == "tiny"


def test_a_name_tells_its_revision_unless_one_is_given() -> None:
    models = load_models({"models": {**TWO, "chat": {"path": "c", "revision": "7"}}}).models
    assert [each.served_revision for each in models.values()] == ["1", "2", "7"]
    assert [each.key for each in models.values()] == ["chat@1", "chat@2", "chat@7"]


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"models": {"a b": {"path": "x"}}}, "models.a b: 'a b' is not a name"),
        ({"models": {"a:b": {"path": "x"}}}, "models.a:b: 'a:b' is not a name"),
        ({"models": {"a": {}}}, "models.a.path: it is missing; name a checkpoint"),
        ({"models": {"a": {"path": "x", "name": "b"}}}, "models.a.name: the table's own name"),
        ({"models": {"a": {"path": "x", "pathh": 1}}}, "models.a.pathh: "),
        (
            {"models": {"a": {"path": "x", "adapters": {"p:q": {"path": "y"}}}}},
            "models.a.adapters: 'p:q' is no name of an adapter",
        ),
        (
            {"models": TWO, "routes": {"chat": {"chat@3": 1}}},
            "routes.chat.chat@3: there is no model",
        ),
        ({"models": TWO, "routes": {"chat": {"chat@1": 0}}}, "routes.chat: its weights sum to 0; give"),
        ({"models": TWO, "routes": {"chat": {}}}, "routes.chat: its weights sum to 0"),
        ({"models": TWO, "routes": {"chat": {"chat@1": -1, "chat@2": 2}}}, "routes.chat.chat@1: -1 is less"),
        ({"models": TWO, "routes": {"chat": {"chat@1": "x"}}}, "routes.chat"),
        ({"models": TWO, "routes": {"new": {"chat@1": 1}}}, "routes.new: models.chat@2 is called 'new', too"),
        (
            {"models": {**TWO, "new": {"path": "c"}}},
            "models.new: models.chat@2 is called 'new', too; every name stands for one thing",
        ),
        (
            {"models": TWO, "shadows": {"chat@1": {"model": "x"}}},
            "shadows.chat@1.model: there is no model",
        ),
        ({"models": TWO, "shadows": {"x": {"model": "chat@1"}}}, "shadows.x: there is no model 'x'"),
        ({"models": TWO, "shadows": {"new": {"model": "chat@1", "share": 2}}}, "shadows.new.share"),
    ],
)
def test_a_mistake_is_named_by_its_key(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_models(tables)
    assert str(refusal.value).startswith(said)


def test_one_model_beside_several_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "millrace.toml"
    file.write_text('[model]\npath = "a"\n[models.b]\npath = "c"\n')
    with pytest.raises(ConfigError, match=r"\[model\] and \[models.<name>\] exclude each other"):
        read_tables(file, {})


def test_two_tables_of_one_name_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "millrace.toml"
    file.write_text('[models.b]\npath = "a"\n[models.b]\npath = "c"\n')
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_tables(file, {})


def test_an_engine_is_told_its_model_by_name_or_in_full() -> None:
    tables = {"models": TWO, "model": {"name": "chat@2"}}
    assert own_model(tables).path == "b"
    assert own_model({"models": TWO, "model": {"name": "other", "path": "z"}}).path == "z"
    with pytest.raises(ConfigError, match=r"model.name: there is no model 'chat'; known: chat@1, chat@2"):
        own_model({"models": TWO, "model": {"name": "chat"}})


def test_another_checkpoint_needs_another_revision() -> None:
    old = load_models({"models": TWO})
    assert "models.chat@1.revision" in replaced(old, load_models({"models": {"chat@1": {"path": "z"}}}))
    changed = {"chat@1": {"path": "a", "prices": {"prompt": 1}}, "chat@3": {"path": "z"}}
    assert not replaced(old, load_models({"models": changed}))


async def test_a_changed_file_is_followed_and_one_that_cannot_be_used_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "millrace.toml"
    file.write_text('[models.a]\npath = "x"\n')
    seen: asyncio.Queue[list[str]] = asyncio.Queue()

    async def apply(tables: dict[str, Any]) -> None:
        seen.put_nowait(list(load_models(tables).models))

    following = asyncio.create_task(Source(file, {}).follow(apply))
    try:
        await asyncio.sleep(0)
        file.write_text('[models.a]\npath = "x"\n[routes]\nb = {c = 1}\n')
        # A ConfigMap is exchanged in this way: another file replaces it.
        while seen.empty():
            beside = tmp_path / "new"
            beside.write_text('[models.a]\npath = "x"\n[models.b]\npath = "y"\n')
            os.replace(beside, file)
            await asyncio.sleep(0.7)
        assert await seen.get() == ["a", "b"]
    finally:
        following.cancel()
