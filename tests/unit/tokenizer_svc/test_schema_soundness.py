"""What strict mode accepts is valid: the grammar that engines run, against an independent validator."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from contract.chat import JsonSchemaFormat
from contract.grammar import EnforcementReport
from tokenizer_svc.config import BUNDLED_CHECKPOINT, PromptLimitsConfig
from tokenizer_svc.grammar.backend import Backend
from tokenizer_svc.grammar.build import build
from tokenizer_svc.grammar.request import GrammarRequest, WorkerReply
from tokenizer_svc.grammar.schema.document import VALIDATORS, Draft

_TOKENIZER_JSON = (BUNDLED_CHECKPOINT / "tokenizer.json").read_text(encoding="utf-8")
_TOKENIZER = LLTokenizer(_TOKENIZER_JSON)
_BACKEND = Backend(_TOKENIZER_JSON, ())
_LIMITS = PromptLimitsConfig(max_schema_depth=64, max_artifact_bytes=1 << 24)


def reply(schema: Any, *, strict: bool = True) -> WorkerReply:
    form = JsonSchemaFormat(json.dumps(schema), strict=strict)
    return build(GrammarRequest(response_format=form), _BACKEND, _LIMITS)


def accepts(schema: Any, value: Any) -> bool:
    return takes(reply(schema), json.dumps(value, ensure_ascii=False))


def takes(reply: WorkerReply, text: str) -> bool:
    """Whether the grammar that was built takes the text."""
    assert reply.built is not None
    matcher = LLMatcher(_TOKENIZER, reply.built.payload.decode(), log_level=0)
    ids = _TOKENIZER.tokenize_str(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def refusal(schema: Any) -> str:
    """Why it is refused where everything must be enforced."""
    refused = reply(schema).refused
    assert refused is not None
    return refused.message


def enforcement(schema: Any) -> EnforcementReport:
    """Of what is built where not everything must be enforced."""
    built = reply(schema, strict=False).built
    assert built is not None
    assert built.enforcement is not None
    return built.enforcement


def unenforced(schema: Any) -> list[str]:
    return [each.path for each in enforcement(schema).unenforced]


@pytest.mark.parametrize(
    ("name", "invalid", "valid"),
    [
        ("date", ["2023-02-29", "1900-02-29", "2023-02-30"], ["2024-02-29", "2000-02-29", "2023-12-31"]),
        ("date-time", ["2023-02-29T01:00:00Z", "2024-01-01T10:00:60Z"], ["2024-02-29T23:59:59Z"]),
        ("time", ["10:00:60Z"], ["10:00:59.5+02:00"]),
        ("hostname", ["a" * 64, "xn--a", "ab--cd", "-a", ".".join(["a" * 60] * 5)], ["a-b.c1", "a--b", "x"]),
        ("email", ["a@" + "b" * 64, "a" * 65 + "@b", "a@xn--a"], ["a.b@c-d.org", "a@[1.2.3.4]"]),
        ("uri-reference", [":a", "1:b", "//a:x", "//a@b@c"], ["a:b", "./1:b", "//a:80/b?c#d", "", "#a"]),
        ("uri-template", ["a\x7f", "{a", "{a..b}"], ["/{+a,b*}", "{a.b:3}", "🙂", "{=a}"]),
    ],
)
def test_formats_mean_what_the_specification_says(name: str, invalid: list[str], valid: list[str]) -> None:
    schema = {"type": "string", "format": name}
    judge = VALIDATORS[Draft.DRAFT2020_12](schema, validate_formats=True)
    for value in [*invalid, *valid]:
        assert judge.is_valid(value) == (value in valid), value
        assert accepts(schema, value) == (value in valid), value


@pytest.mark.parametrize("name", ["iri", "iri-reference", "idn-email", "idn-hostname", "regex"])
def test_a_standard_format_without_a_grammar_is_not_silently_left_out(name: str) -> None:
    assert "format at /format" in refusal({"format": name})
    assert unenforced({"format": name}) == ["/format"]


def test_a_format_concerns_strings_alone() -> None:
    assert accepts({"format": "uri-reference"}, {"a": 1})
    assert not accepts({"format": "uri-reference"}, ":a")


@pytest.mark.parametrize(
    "schema",
    [
        {"dependentSchemas": {"": {"required": ["a"], "enum": [1]}, "b": {"enum": [1]}}},
        {"dependentRequired": {"": ["a"], "b": ["c"]}},
        {"dependencies": {"": ["a"]}, "not": {"required": ["b"]}},
        {"oneOf": [{"required": [""]}, {"required": ["a"]}], "not": {"required": ["b"]}},
    ],
)
def test_a_property_may_have_no_name(schema: Any) -> None:
    judge = VALIDATORS[Draft.DRAFT2020_12](schema)
    for value in ({"": 1}, {}, {"": 1, "a": 1}, {"a": 1}, {"b": 1}, {"": 1, "b": 1}):
        assert accepts(schema, value) <= judge.is_valid(value), value


@pytest.mark.parametrize(
    ("draft", "schema", "value"),
    [
        # Keywords that a draft does not have constrain nothing, and so are never broken.
        (6, {"not": {"prefixItems": [{"type": "string"}], "minItems": 2}}, [1, 2]),
        (7, {"not": {"prefixItems": [{"type": "string"}], "minItems": 2}}, [1, 2]),
        # Drafts that ignore what stands beside a reference.
        (7, {"not": {"$ref": "#/definitions/a", "type": "null"}, "definitions": {"a": {"minimum": 0}}}, 5),
    ],
)
def test_a_complement_holds_as_the_draft_reads_it(draft: int, schema: Any, value: Any) -> None:
    schema = {"$schema": f"http://json-schema.org/draft-0{draft}/schema#", **schema}
    assert not VALIDATORS[Draft(draft)](schema).is_valid(value)
    assert not accepts(schema, value)


def test_strings_outside_a_format_without_a_grammar_are_not_claimed_to_be_none() -> None:
    assert "format at /not/format" in refusal({"not": {"format": "iri"}})
    assert reply({"not": {"format": "iri"}}, strict=False).built is not None


@pytest.mark.parametrize("number", ["1e400", "NaN", "-Infinity"])
@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ('{"type": "number", "minimum": %s}', "/minimum"),
        ('{"type": "number", "multipleOf": %s}', "/multipleOf"),
        ('{"enum": [null, "null", %s]}', "/enum/2"),
        ('{"properties": {"a": {"const": {"b": %s}}}}', "/properties/a/const/b"),
    ],
)
def test_numbers_beyond_json_are_refused(schema: str, place: str, number: str) -> None:
    form = JsonSchemaFormat(schema % number, strict=True)
    refused = build(GrammarRequest(response_format=form), _BACKEND, _LIMITS).refused
    assert refused is not None
    assert refused.message.endswith(f"numbers must be finite, not so at {place}")


_DRAFT7 = {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a": {"type": "array"}}}


@pytest.mark.parametrize(
    ("beside", "accepted", "rejected"),
    [
        # Enforced, although the draft would ignore it.
        ({"maxItems": 1}, [1], [1, 2]),
        # Ignored, as the draft says: it cannot be enforced, or would leave nothing.
        ({"uniqueItems": True}, [1, 1], 1),
        ({"type": "string"}, [1], "x"),
    ],
)
def test_constraints_beside_references_of_old_drafts(beside: Any, accepted: Any, rejected: Any) -> None:
    schema = {**_DRAFT7, "$ref": "#/definitions/a", **beside}
    assert accepts(schema, accepted)
    assert not accepts(schema, rejected)
    # In newer drafts they hold, and are refused where they cannot be kept.
    newer = {**schema, "$schema": "https://json-schema.org/draft/2020-12/schema"}
    assert (reply(newer).built is not None) == (beside == {"maxItems": 1})


@pytest.mark.parametrize(
    ("schema", "keyword", "path"),
    [
        ({"patternProperties": {"^a": {"const": 9007199254740993}}}, "const", "/patternProperties/^a/const"),
        ({"not": {"const": 12345678901234567}}, "const", "/not/const"),
        ({"oneOf": [{"const": 123456789.12345679}, {"type": "string"}]}, "const", "/oneOf/0/const"),
        ({"allOf": [{"enum": ["a", 2**63]}, {"anyOf": [{"minimum": 1}, {}, True]}]}, "enum", "/allOf/0/enum"),
    ],
)
def test_listed_numbers_that_the_back_end_would_round_are_told(schema: Any, keyword: str, path: str) -> None:
    assert "would be rounded" in refusal(schema)
    assert (keyword, path) in {(each.keyword, each.path) for each in enforcement(schema).approximated}


def test_more_is_accepted_in_place_of_a_number_that_would_be_rounded() -> None:
    lenient = reply({"enum": ["a", 1, {"id": 1234567890123456789}, 2**63 + 1]}, strict=False)
    for value in ("a", {"id": 1234567890123456789}, 2**63 + 1):
        assert takes(lenient, json.dumps(value)), value
    assert not takes(lenient, '"b"')


@pytest.mark.parametrize("number", [2**53, -(2**53), 10**20, 0.1, 123456789012345, 1.5, -0.25])
def test_other_listed_numbers_are_written_as_they_are(number: float) -> None:
    assert accepts({"const": number}, number)
    assert not accepts({"enum": [number]}, number + 1e6)


def test_counts_may_be_written_as_fractions() -> None:
    schema = {
        "type": "array",
        "items": {"type": "string", "maxLength": 1.0},
        "minItems": 1.0,
        "maxItems": 2.0,
    }
    assert [accepts(schema, value) for value in ([], ["a"], ["a", "b"], ["ab"], ["a"] * 3)] == [
        False, True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "invalid", "valid"),
    [
        ({"type": "number", "minimum": -0.3, "exclusiveMaximum": 0}, ["-0", "0"], ["-0.3", "-0.01"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.3}, ["0", "0.31"], ["0.3", "0.01"]),
        ({"type": "number", "exclusiveMinimum": 1, "maximum": 1.3}, ["1", "1.0"], ["1.2"]),
        ({"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.3}]}, ["0"], ["0.2"]),
        ({"type": "integer", "minimum": 2**53 + 1}, [str(2**53)], [str(2**53 + 2)]),
        ({"type": "integer", "exclusiveMinimum": 2**53}, [str(2**53)], [str(2**53 + 2)]),
        (
            {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            [str(2**63)],
            [str(2**63 - 1), "-5"],
        ),
        ({"type": "number", "maximum": 1.7976931348623157e308}, ["1e309"], ["0.5"]),
        ({"allOf": [{"enum": ["1.2.3.4", "a"]}, {"format": "ipv4"}]}, ['"a"'], ['"1.2.3.4"']),
        ({"type": "string", "pattern": '^(?:[^"\\x00]|\\x00)$'}, ['"\\""'], ['"a"']),
    ],
)
def test_bounds_formats_and_classes_at_their_edges(schema: Any, invalid: list[str], valid: list[str]) -> None:
    built = reply(schema)
    for text in [*invalid, *valid]:
        assert takes(built, text) == (text in valid), text


@pytest.mark.parametrize("pattern", ["a\\bc", "(a)\\1"])
def test_patterns_without_a_form_are_named_or_unenforced(pattern: str) -> None:
    assert "pattern at /pattern" in refusal({"pattern": pattern})
    assert unenforced({"pattern": pattern}) == ["/pattern"]


def test_a_value_that_looks_like_a_reference_is_a_value() -> None:
    schema = {"enum": [{"$ref": "#/$defs/nothing"}, {"minimum": 0.5}]}
    assert accepts(schema, {"$ref": "#/$defs/nothing"})
    assert not accepts(schema, {"$ref": "#/$defs/p0"})


def test_half_a_surrogate_pair_is_refused_as_that() -> None:
    assert "half a surrogate pair" in refusal({"const": "\ud800"})


def test_collections_of_garbage_go_on_after_a_schema() -> None:
    assert reply({"const": 1}).built is not None
    assert reply({"const": "\ud800", "type": "integer", "$ref": 1}, strict=True).refused is not None
    assert gc.isenabled()
