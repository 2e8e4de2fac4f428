"""What the tokenizer service compiles, the engine follows: the artifact is the contract between them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from contract.chat import ChoiceFormat, JsonObjectFormat, JsonSchemaFormat, RegexFormat, ToolChoiceMode
from engine.sampling import grammar as engine_grammar
from engine.types import GrammarSpec
from tests.unit.checkpoint.sentencepiece_models import model_of
from tests.unit.tokenizer_svc.families import make
from tokenizer_svc.config import BUNDLED_CHECKPOINT, PromptLimitsConfig
from tokenizer_svc.grammar import request as service
from tokenizer_svc.grammar.backend import Backend
from tokenizer_svc.grammar.build import build
from tokenizer_svc.text.checkpoint import load_checkpoint

LIMITS = PromptLimitsConfig(max_schema_depth=64, max_artifact_bytes=1 << 20)
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOL = service.ToolSpec(name="f", parameters_json=json.dumps(PARAMETERS))


def test_both_name_the_same_back_end() -> None:
    assert engine_grammar.BACKEND == service.BACKEND


@pytest.mark.parametrize(
    "asked",
    [
        service.GrammarRequest(response_format=JsonObjectFormat()),
        service.GrammarRequest(
            response_format=JsonSchemaFormat(json.dumps({"oneOf": [{"type": "null"}, {"enum": [1]}]}))
        ),
        service.GrammarRequest(response_format=RegexFormat("a+/b")),
        service.GrammarRequest(response_format=ChoiceFormat(("x", "y")), reasoning=service.Reasoning.OPEN),
        service.GrammarRequest(
            tools=service.ToolRules(tools=(TOOL,), mode=ToolChoiceMode.AUTO, parallel=True, format="hermes")
        ),
    ],
)
def test_the_engine_builds_a_matcher_from_every_artifact(
    asked: service.GrammarRequest, tmp_path: Path
) -> None:
    checkpoint = load_checkpoint(make("qwen_tools", tmp_path))
    reply = build(asked, Backend(checkpoint.tokenizer_json, checkpoint.eos_token_ids), LIMITS)
    assert reply.built is not None
    vocab_size = len(checkpoint.vocabulary.tokens)
    engine = engine_grammar.GrammarEngine(tmp_path, vocab_size, checkpoint.eos_token_ids)
    try:
        spec = GrammarSpec(digest="d", payload=reply.built.payload, backend=service.BACKEND)
        matcher = engine.matcher(spec, ())
        masks = engine.fill([(matcher, ())]).result(timeout=30)
        assert masks.problems == [""]
        assert np.any(masks.masks != 0)
        assert np.any(masks.masks != -1)
    finally:
        engine.close()


def test_the_engine_follows_what_the_bounds_of_both_admit(tmp_path: Path) -> None:
    """More optional properties than the library's own bounds let it follow."""
    checkpoint = load_checkpoint(make("qwen_tools", tmp_path))
    backend = Backend(checkpoint.tokenizer_json, checkpoint.eos_token_ids)
    properties = {f"p{number}": {"type": "integer"} for number in range(700)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    asked = service.GrammarRequest(response_format=JsonSchemaFormat(json.dumps(schema)))
    reply = build(asked, backend, LIMITS)
    assert reply.built is not None
    ids = Tokenizer.from_str(checkpoint.tokenizer_json).encode('{"p3":1,"p650":2}').ids
    engine = engine_grammar.GrammarEngine(
        tmp_path, len(checkpoint.vocabulary.tokens), checkpoint.eos_token_ids
    )
    try:
        spec = GrammarSpec(digest="d", payload=reply.built.payload, backend=service.BACKEND)
        assert engine.matcher(spec, ()).accept(ids) == len(ids)
    finally:
        engine.close()


def test_both_read_a_converted_vocabulary_alike(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model_of("llama").SerializeToString())
    checkpoint = load_checkpoint(tmp_path)
    asked = service.GrammarRequest(response_format=RegexFormat("the sea, [a-z]+ 東京 🙂\n"))
    reply = build(asked, Backend(checkpoint.tokenizer_json, checkpoint.eos_token_ids), LIMITS)
    assert reply.built is not None
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
    engine = engine_grammar.GrammarEngine(tmp_path, len(checkpoint.vocabulary.tokens), (2,))
    try:
        spec = GrammarSpec(digest="d", payload=reply.built.payload, backend=service.BACKEND)
        # Without the space in front, which is no part of an answer.
        right, wrong = (
            tokenizer.encode(f"\nthe sea, morning 東京 {end}\n", add_special_tokens=False).ids[2:]
            for end in "🙂🙁"
        )
        assert engine.matcher(spec, ()).accept(right) == len(right)
        with pytest.raises(engine_grammar.GrammarError, match="doesn't satisfy the grammar"):
            engine.matcher(spec, ()).accept(wrong)
    finally:
        engine.close()


@pytest.mark.parametrize("reasoning", [service.Reasoning.OPEN, service.Reasoning.OPTIONAL])
def test_an_answer_whose_thoughts_take_their_time_ends_validly_within_its_limit(
    reasoning: service.Reasoning,
) -> None:
    checkpoint = load_checkpoint(BUNDLED_CHECKPOINT)
    schema = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    asked = service.GrammarRequest(response_format=JsonSchemaFormat(json.dumps(schema)), reasoning=reasoning)
    reply = build(asked, Backend(checkpoint.tokenizer_json, checkpoint.eos_token_ids), LIMITS)
    assert reply.built is not None
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
    vocab_size = len(checkpoint.vocabulary.tokens)
    engine = engine_grammar.GrammarEngine(BUNDLED_CHECKPOINT, vocab_size, checkpoint.eos_token_ids)
    try:
        spec = GrammarSpec(digest="d", payload=reply.built.payload, backend=service.BACKEND)
        output = tokenizer.encode("hm [" if reasoning is service.Reasoning.OPEN else "<think>hm [").ids
        matcher = engine.matcher(spec, output, 120)
        more = tokenizer.encode(" and", add_special_tokens=False).ids[0]
        while len(output) < 120 and not matcher.finished:
            row = engine.fill([(matcher, ())]).result(timeout=30).masks[0].view(np.uint32)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            # It thinks as long as it may.
            output.append(more if more in allowed else int(allowed[0]))
            matcher.accept(output[-1:])
        assert len(output) > 60
        answer = tokenizer.decode(output, skip_special_tokens=True).rpartition("</think>")[2]
        assert isinstance(json.loads(answer)["x"], str)
    finally:
        engine.close()
