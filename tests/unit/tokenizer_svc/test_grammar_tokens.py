"""Added tokens that are not special count as their text in grammars, whatever the vocabulary's format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from contract.chat import JsonSchemaFormat, LarkFormat, RegexFormat, ToolChoiceMode
from tests.unit.tokenizer_svc.families import make
from tests.unit.tokenizer_svc.test_grammars import Family, rules
from tokenizer_svc.grammar.request import Built, GrammarRequest, ToolSpec


@pytest.mark.parametrize(
    "tag", ["<think>", "</think>", "<tool_call>", "</tool_call>", "<x y>", "<ü→>", "[A]"]
)
@pytest.mark.parametrize("name", ["qwen_tools", "mistral", "gemma", "llama3"])
def test_added_tokens_that_are_not_special_count_as_their_text(name: str, tag: str, tmp_path: Path) -> None:
    folder = make(name, tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(tag, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    side = Family.at(folder)
    token_id = tokenizer.token_to_id(tag)
    ids = [*side.matcher_tokenizer.tokenize_str('"a'), token_id, *side.matcher_tokenizer.tokenize_str('b"')]
    forms = [JsonSchemaFormat('{"type": "string"}'), RegexFormat('".*"'), LarkFormat('start: /"[^"]*"/')]
    for form in [*forms, JsonSchemaFormat(json.dumps({"const": f"a{tag}b"}, ensure_ascii=False))]:
        built = side.build(GrammarRequest(response_format=form))
        assert isinstance(built, Built)
        matcher = side.matcher(built)
        for token in ids:
            assert int.from_bytes(matcher.compute_bitmask(), "little") >> token & 1, (form, token)
            assert matcher.try_consume_tokens([token]) == 1
        assert matcher.is_accepting()


def test_arguments_of_a_call_may_hold_the_model_s_own_marks(tmp_path: Path) -> None:
    qwen = Family("qwen_tools", tmp_path)
    memo = ToolSpec(
        name="memo", parameters_json='{"type": "object", "properties": {"text": {"type": "string"}}}'
    )
    request = rules(qwen, ToolChoiceMode.REQUIRED, (memo,))
    text = "say </tool_call> and <think>"
    call = f'<tool_call>\n{{"name": "memo", "arguments": {{"text": "{text}"}}}}\n</tool_call>'
    assert qwen.accepts(request, call)
