"""Chat templates render and encode as `transformers` does, and refuse with a clear error."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from contract.errors import MillraceError, Reason
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from tests.unit.tokenizer_svc.building import Text, conversation
from tests.unit.tokenizer_svc.checkpoints import byte_level, write
from tests.unit.tokenizer_svc.families import CALLED, CHATML, FAMILIES, PLAIN, TOOLS, WITH_TOOLS, make
from tokenizer_svc.config import PromptLimitsConfig
from tokenizer_svc.messages.wire import vocabulary_response
from tokenizer_svc.text.checkpoint import load_checkpoint


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Text, Any]:
    path = make(request.param, tmp_path_factory.mktemp(request.param))
    return request.param, Text(path), AutoTokenizer.from_pretrained(str(path))


def oracle(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options))


@pytest.mark.parametrize("messages", PLAIN)
def test_plain_conversations(family: tuple[str, Text, Any], messages: list[dict[str, Any]]) -> None:
    _, text, tokenizer = family
    assert text.ids(conversation(messages)) == oracle(tokenizer, messages, add_generation_prompt=True)


def test_a_history_long_enough_for_the_turn_cache(family: tuple[str, Text, Any]) -> None:
    _, text, tokenizer = family
    messages = [{"role": "system", "content": "s " * 300}]
    for turn in range(12):
        messages += [{"role": "user", "content": f"question {turn} <b> " * 9}]
        expected = oracle(tokenizer, messages, add_generation_prompt=True)
        assert text.ids(conversation(messages)) == expected
        assert text.ids(conversation(messages)) == expected
        messages += [{"role": "assistant", "content": f"answer {turn}  " * 7 + "end"}]


def test_tools_and_their_calls(family: tuple[str, Text, Any]) -> None:
    name, text, tokenizer = family
    if name not in WITH_TOOLS:
        pytest.skip("the template has no tools")
    messages = copy.deepcopy(CALLED)
    mine = text.ids(conversation(messages, TOOLS))
    if name.startswith("deepseek"):
        # Its template takes arguments as text.
        call = messages[1]["tool_calls"][0]["function"]
        call["arguments"] = json.dumps(call["arguments"], ensure_ascii=False)
    assert mine == oracle(tokenizer, messages, tools=TOOLS, add_generation_prompt=True)


def test_switches_and_reasoning_in_history(tmp_path: Path) -> None:
    path = make("qwen_tools", tmp_path)
    text, tokenizer = Text(path), AutoTokenizer.from_pretrained(str(path))
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nanswer"},
        {"role": "user", "content": "again"},
    ]
    for thinking in (True, False):
        mine = text.ids(conversation(messages, template_options={"enable_thinking": thinking}))
        assert mine == oracle(tokenizer, messages, add_generation_prompt=True, enable_thinking=thinking)
    messages.append({"role": "assistant", "content": "so", "reasoning_content": "because"})
    rendered = text.templates.render(conversation(messages))
    assert "<think>\nbecause\n</think>" in rendered


def test_continuing_the_final_message(family: tuple[str, Text, Any]) -> None:
    _, text, tokenizer = family
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer is"}]
    mine = text.ids(conversation(messages, continue_final_message=True))
    assert mine == oracle(tokenizer, messages, continue_final_message=True)


def test_named_templates(tmp_path: Path) -> None:
    templates = {
        "default": "D{{ messages[0].content }}",
        "tool_use": "T{{ tools[0].type }} {{ messages[0].content }}",
        "rag": "R{{ documents[0].title }} {{ messages[0].content }}",
    }
    text = Text(write(tmp_path, byte_level(CHATML), templates))
    messages = [{"role": "user", "content": "q"}]
    assert text.templates.render(conversation(messages)) == "Dq"
    assert text.templates.render(conversation(messages, TOOLS)) == "Tfunction q"
    documents = ({"title": "a paper", "text": "..."},)
    rag = conversation(messages, template_name="rag", documents=documents)
    assert text.templates.render(rag) == "Ra paper q"
    with pytest.raises(MillraceError) as caught:
        text.templates.render(conversation(messages, template_name="nope"))
    assert caught.value.reason is Reason.TEMPLATE_FAILED
    assert "default, rag, tool_use" in caught.value.message


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{{ raise_exception('only one turn') }}", "only one turn"),
        ("{{ messages[0].nothing.at_all }}", "nothing"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(999999999) %}x{% endfor %}", "Range too big"),
        ("{{ namespace(__class__=1) }}", "private"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_template_errors_are_the_callers_to_see(template: str, part: str, tmp_path: Path) -> None:
    text = Text(write(tmp_path, byte_level(CHATML), template))
    with pytest.raises(MillraceError) as caught:
        text.templates.render(conversation([{"role": "user", "content": "q"}]))
    assert caught.value.reason is Reason.TEMPLATE_FAILED
    assert part in caught.value.message


def test_output_and_time_are_limited(tmp_path: Path) -> None:
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}xxxxxxxxxx{% endfor %}{% endfor %}"
    path = write(tmp_path, byte_level(CHATML), endless)
    question = conversation([{"role": "user", "content": "q"}])
    with pytest.raises(MillraceError, match="more than 1000 bytes"):
        Text(path, PromptLimitsConfig(max_rendered_bytes=1000)).templates.render(question)
    with pytest.raises(MillraceError, match=r"longer than 0\.01 s"):
        Text(path, PromptLimitsConfig(max_render_s=0.01)).templates.render(question)


def test_a_broken_template_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'default', line 2: .*; correct it, .*--chat-template"):
        Text(write(tmp_path, byte_level(CHATML), "{{ messages }}\n{% if %}"))


def test_a_template_that_is_given_takes_the_place_of_all_others(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level(CHATML), {"default": "D", "tool_use": "T"})
    given = tmp_path / "given.jinja"
    given.write_text("<tool_call>{{ messages[0].content }}é", encoding="utf-8")
    checkpoint = load_checkpoint(folder, ModelConfig(chat_template=str(given)))
    assert checkpoint.templates == {"default": "<tool_call>{{ messages[0].content }}é"}
    assert checkpoint.tool_call_format == "hermes"
    given.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"model\.chat_template: .*given\.jinja cannot be read"):
        load_checkpoint(folder, ModelConfig(chat_template=str(given)))


def test_developer_messages_fall_back_to_system(tmp_path: Path) -> None:
    text = Text(make("chatml", tmp_path))
    rendered = text.templates.render(conversation([{"role": "developer", "content": "rules"}]))
    assert "<|im_start|>system\nrules" in rendered


QUESTION = [{"role": "user", "content": "q"}]
SAYS = "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("template", "given", "field"),
    [
        (SAYS, {"documents": ({"title": "a paper"},)}, "documents"),
        (SAYS, {"template_options": {"date": "today"}}, "template_options.date"),
        (SAYS, {"template_options": {"enable_thinking": True}}, "template_options.enable_thinking"),
        (SAYS, {"template_options": {"reasoning_effort": "low"}}, "template_options.reasoning_effort"),
        # It thinks, whatever is said.
        (
            SAYS + "{{ content.split('</think>') }}",
            {"template_options": {"thinking": False}},
            "template_options.thinking",
        ),
    ],
)
def test_what_the_template_does_not_read_is_refused(
    template: str, given: dict[str, Any], field: str, tmp_path: Path
) -> None:
    text = Text(write(tmp_path, byte_level(CHATML), template))
    with pytest.raises(MillraceError) as caught:
        text.templates.render(conversation(QUESTION, **given))
    assert caught.value.reason is Reason.UNSUPPORTED_FIELD
    assert caught.value.field == f"conversation.{field}"


@pytest.mark.parametrize(
    ("template", "options"),
    [
        (SAYS, {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}),
        # Little thinking is thinking, of a model that always does.
        (
            SAYS + "{{ ''.split('</think>')[0] }}",
            {"enable_thinking": True, "thinking": True, "reasoning_effort": "minimal"},
        ),
        # One of the names is enough.
        (SAYS + "{% if thinking %}{% endif %}", {"enable_thinking": True, "thinking": True}),
        (SAYS + "{% set a = date is defined %}", {"date": "today"}),
    ],
)
def test_options_that_are_read_or_change_nothing_are_taken(
    template: str, options: dict[str, Any], tmp_path: Path
) -> None:
    text = Text(write(tmp_path, byte_level(CHATML), template))
    assert text.templates.render(conversation(QUESTION, template_options=options)) == "q"


@pytest.mark.parametrize(("reads", "takes"), [("enable_thinking", False), ("reasoning_effort", True)])
def test_who_reads_the_vocabulary_learns_whether_the_template_takes_an_effort(
    reads: str, takes: bool, tmp_path: Path
) -> None:
    path = write(tmp_path, byte_level(CHATML), SAYS + f"{{{{ {reads} }}}}")
    assert vocabulary_response(load_checkpoint(path)).takes_effort is takes


NAMED = (
    "{% for each in messages %}{{ each.role }}"
    "{% if each.role != 'system' and each.name is defined %} {{ each['name'] }}{% endif %}"
    ": {{ each.content }};{% endfor %}"
)


def test_names_that_the_template_does_not_write_are_refused(tmp_path: Path) -> None:
    named = {"role": "user", "content": "q", "name": "ann"}
    text = Text(make("chatml", tmp_path))
    with pytest.raises(MillraceError) as caught:
        text.templates.render(conversation([{"role": "system", "content": "s"}, named]))
    assert caught.value.reason is Reason.UNSUPPORTED_FIELD
    assert caught.value.field == "conversation.messages[1].name"
    assert "names of user messages" in caught.value.message


def test_each_role_has_its_own_place_for_a_name(tmp_path: Path) -> None:
    text = Text(write(tmp_path, byte_level(CHATML), NAMED))
    messages = [
        {"role": "user", "content": "q", "name": "ann"},
        {"role": "assistant", "content": "a", "name": "bob"},
    ]
    assert text.templates.render(conversation(messages)) == "user ann: q;assistant bob: a;"
    with pytest.raises(MillraceError) as caught:
        text.templates.render(conversation([{"role": "system", "content": "s", "name": "eve"}, *messages]))
    assert caught.value.field == "conversation.messages[0].name"


def test_a_tools_name_is_taken_by_every_template(tmp_path: Path) -> None:
    text = Text(
        write(tmp_path, byte_level(CHATML), "{% for each in messages %}{{ each.content }}{% endfor %}")
    )
    tool = {"role": "tool", "content": "r", "tool_call_id": "c", "name": "add"}
    assert text.templates.render(conversation([*QUESTION, tool])) == "qr"


def test_nothing_is_refused_where_the_template_takes_no_such_trial(tmp_path: Path) -> None:
    two = (
        "{% if messages|length != 4 %}{{ raise_exception('four') }}{% endif %}"
        "{{ messages | map(attribute='content') | join }}"
    )
    text = Text(write(tmp_path, byte_level(CHATML), two))
    named = {"role": "user", "content": "q", "name": "ann"}
    assert text.templates.render(conversation([named] * 4)) == "qqqq"


def test_options_cannot_replace_what_the_service_sets(tmp_path: Path) -> None:
    text = Text(make("chatml", tmp_path))
    with pytest.raises(MillraceError, match="add_generation_prompt"):
        text.templates.render(
            conversation(
                [{"role": "user", "content": "q"}], template_options={"add_generation_prompt": False}
            )
        )
