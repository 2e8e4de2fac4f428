"""Whether thoughts may precede a constrained answer: by what the template wrote, and the client asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf import struct_pb2
from millrace.common.v1 import chat_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

from tests.unit.tokenizer_svc.checkpoints import byte_level, write
from tests.unit.tokenizer_svc.families import CHATML, MARKUP, make
from tokenizer_svc.config import PromptLimitsConfig
from tokenizer_svc.grammar.request import GrammarRequest, PromptRequest, Reasoning
from tokenizer_svc.prompt.prompts import Prompts
from tokenizer_svc.text.checkpoint import load_checkpoint

_TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
SILENT = _TURNS + "{% endif %}"
OPENS = _TURNS + "<think>\n{% endif %}"
CLOSES = _TURNS + "</think>{% endif %}"
SWITCHED = (
    _TURNS
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    + "{% endif %}"
)

# It opens the thoughts where a client asks for them: unasked, the model does not think.
ON_REQUEST = _TURNS + "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}"


def _reasoning(folder: Path, template: str, tokens: tuple[str, ...] = MARKUP, **options: Any) -> Reasoning:
    path = write(folder, byte_level(CHATML, tokens), template, config={"eos_token": "<|im_end|>"})
    return _reasoning_at(path, **options)


def _reasoning_at(path: Path, **options: Any) -> Reasoning:
    prompts = Prompts(load_checkpoint(path), PromptLimitsConfig(), turn_cache_tokens=1024)
    fields = {key: struct_pb2.Value(bool_value=value) for key, value in options.items() if key != "more"}
    conversation = chat_pb2.Conversation(
        messages=[
            chat_pb2.Message(role=chat_pb2.ROLE_USER, content="Say <think> and </think>"),
            *options.get("more", ()),
        ],
        template_options=struct_pb2.Struct(fields=fields),
        continue_final_message="more" in options,
    )
    form = chat_pb2.ResponseFormat(json_object=chat_pb2.JsonObject())
    request = tokenizer_pb2.PrepareRequest(conversation=conversation, response_format=form)
    grammar = prompts.prepared(request, PromptRequest()).grammar
    assert grammar is not None
    return msgspec.msgpack.decode(grammar.payload, type=GrammarRequest).reasoning


@pytest.mark.parametrize(
    ("template", "options", "expected"),
    [
        (SILENT, {}, Reasoning.OPTIONAL),
        (OPENS, {}, Reasoning.OPEN),
        (CLOSES, {}, Reasoning.NONE),
        (SWITCHED, {}, Reasoning.OPTIONAL),
        (SWITCHED, {"enable_thinking": True}, Reasoning.OPTIONAL),
        (SWITCHED, {"enable_thinking": False}, Reasoning.NONE),
        (SWITCHED, {"thinking": False, "enable_thinking": False}, Reasoning.NONE),
        (ON_REQUEST, {}, Reasoning.NONE),
        (ON_REQUEST, {"enable_thinking": True}, Reasoning.OPEN),
    ],
)
def test_the_model_may_think_unless_the_template_or_the_client_has_ended_it(
    tmp_path: Path, template: str, options: dict[str, Any], expected: Reasoning
) -> None:
    assert _reasoning(tmp_path, template, **options) is expected


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("gemma4", {}, Reasoning.NONE),
        ("gemma4", {"enable_thinking": True}, Reasoning.OPTIONAL),
        ("minimax", {}, Reasoning.OPEN),
        ("deepseek_v32", {}, Reasoning.OPEN),
        ("kimi", {}, Reasoning.OPTIONAL),
        ("harmony", {}, Reasoning.OPTIONAL),
        ("command", {}, Reasoning.OPTIONAL),
        ("granite", {}, Reasoning.OPTIONAL),
        ("phi4", {}, Reasoning.NONE),
    ],
)
def test_families_think_between_tags_of_their_own(
    name: str, options: dict[str, Any], expected: Reasoning, tmp_path: Path
) -> None:
    assert _reasoning_at(make(name, tmp_path), **options) is expected


def test_an_answer_that_is_continued_holds_no_more_thoughts(tmp_path: Path) -> None:
    begun = chat_pb2.Message(role=chat_pb2.ROLE_ASSISTANT, content='{"a"')
    assert _reasoning(tmp_path, SILENT, more=[begun]) is Reasoning.NONE


def test_a_model_without_a_format_of_thoughts_has_none(tmp_path: Path) -> None:
    assert _reasoning(tmp_path, SILENT, ()) is Reasoning.NONE
