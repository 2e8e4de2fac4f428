"""Stored responses as training data: of whom, what of them, and what is left out."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from services.distill.__main__ import main
from tests.unit.gateway.store.test_endpoints import create, engine, send, serving
from tests.unit.gateway.store.test_store import KEY

CONFIG = """
[gateway.store]
tenants = ["*"]
url = "sqlite:///{folder}/store.sqlite"
key = "{key}"
[tenants.acme]
training_data = true
[tenants.other]
[tenants.shy]
"""
ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def config(folder: Path, text: str = CONFIG, key: str = KEY) -> Path:
    path = folder / "millrace.toml"
    path.write_text(text.format(folder=folder, key=key))
    return path


def export(folder: Path, *arguments: str, name: str = "out.jsonl", **changed: str) -> list[dict[str, Any]]:
    out = folder / name
    assert main(["export", "--config", str(config(folder, **changed)), "--out", str(out), *arguments]) == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    return [json.loads(line) for line in out.read_text().splitlines()]


async def filled(folder: Path) -> None:
    """A chain of two with a tool and thoughts, a turn in a conversation, and another tenant's answer."""
    tool = {"type": "function", "name": "add", "description": "Adds.", "parameters": ADD}
    async with serving(folder, engine("<think>Easy.</think>It is 4.")) as stack:
        first = await create(stack, "2+2?", instructions="Be brief.", tools=[tool], store=True)
        await create(stack, "Sure?", previous_response_id=first["id"], store=True)
        made = await send(stack, "POST", "conversations", items=[{"role": "user", "content": "hello"}])
        for text in ("in it", "later"):
            await create(stack, text, conversation=made.json()["id"], store=True)
        await send(stack, "POST", "responses", tenant="other", model="tiny", input="secret", store=True)


def spoken(example: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each["role"], each["content"]) for each in example["messages"]]


async def test_whole_answers_of_consenting_tenants_are_written(tmp_path: Path) -> None:
    await filled(tmp_path)
    examples = export(tmp_path)
    answer = ("assistant", "It is 4.")
    hello = ("user", "hello")
    assert sorted(map(spoken, examples)) == sorted(
        [
            [("system", "Be brief."), ("user", "2+2?"), answer],
            [("user", "2+2?"), answer, ("user", "Sure?"), answer],
            [hello, ("user", "in it"), answer],
            [hello, ("user", "in it"), answer, ("user", "later"), answer],
        ]
    )
    first = next(each for each in examples if "tools" in each)
    function = {"name": "add", "description": "Adds.", "parameters": ADD}
    assert first["tools"] == [{"type": "function", "function": function}]
    assert not any("reasoning_content" in said for each in examples for said in each["messages"])


async def test_thoughts_models_and_times_are_chosen(tmp_path: Path) -> None:
    await filled(tmp_path)
    thoughts = [
        each["messages"][-1]["reasoning_content"] for each in export(tmp_path, "--thoughts", name="a.jsonl")
    ]
    assert thoughts == ["Easy."] * 4
    assert export(tmp_path, "--model", "another", name="b.jsonl") == []
    assert export(tmp_path, "--since", "2999-01-01", name="c.jsonl") == []
    assert len(export(tmp_path, "--since", "2020-01-01", "--model", "tiny", name="d.jsonl")) == 4


async def test_what_cannot_be_learned_from_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(tmp_path, engine("It is 4.")) as stack:
        first = await create(stack, "2+2?", store=True)
        await create(stack, "Sure?", previous_response_id=first["id"], store=True)
        await send(stack, "DELETE", f"responses/{first['id']}")
    assert export(tmp_path, name="a.jsonl") == []
    assert "1 left out: a turn before it is gone" in capsys.readouterr().err
    assert export(tmp_path, name="b.jsonl", key="another key of thirty-two characters") == []
    assert "cannot be decrypted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text", "told"),
    [
        (("--tenant", "other"), CONFIG, "'other' has not consented"),
        (("--tenant", "nobody"), CONFIG, "'nobody' is no tenant"),
        ((), "[tenants.acme]\n", "no tenant has consented"),
        ((), "[tenants.acme]\ntraining_data = true\n", "gateway.store.tenants"),
    ],
)
def test_nobody_teaches_without_consent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], text: str, told: str
) -> None:
    out = tmp_path / "out.jsonl"
    assert main(["export", "--config", str(config(tmp_path, text)), "--out", str(out), *arguments]) == 2
    assert told in capsys.readouterr().err
    assert not out.exists()


def test_a_file_that_is_there_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    assert main(["export", "--config", str(config(tmp_path)), "--out", str(out)]) == 2
    assert (out.read_text(), "--out" in capsys.readouterr().err) == ("mine", True)
