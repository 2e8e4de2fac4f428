"""Guided answers end validly within their token limit, by the same tokens however they are computed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import llguidance
import numpy as np
import pytest
import tokenizers

from engine.runner.runner import ModelRunner
from engine.sampling.grammar import GrammarEngine, Matcher
from engine.speculation_config import SpeculationConfig
from engine.types import GrammarSpec, SamplingParams
from tests.unit.engine.runner.driver import Driver, Job, open_runner

BUNDLED = Path("models/millrace-nano")
TEXT = {"type": "string"}
PERSON = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "tags": {"type": "array", "items": TEXT},
        "home": {
            "type": "object",
            "properties": {"rooms": {"type": "integer", "minimum": 10}, "owned": {"type": "boolean"}},
            "required": ["rooms", "owned"],
            "additionalProperties": False,
        },
        "mail": {"type": "string", "pattern": "^[a-z]+@[a-z]+$"},
    },
    "required": ["name", "home", "mail"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "string": TEXT,
    "array": {"type": "array", "items": {"type": "array", "items": TEXT}, "minItems": 1},
    "object": PERSON,
    "anything": {},
    "list": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": TEXT,
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "number": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "long": {"type": "string", "minLength": 60},
    "pattern": {"type": "string", "pattern": "^[a-z]+@[a-z]+\\.com$"},
}


def spec_of(schema: Any) -> GrammarSpec:
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, {"whitespace_flexible": False})
    return GrammarSpec(digest="", payload=grammar.encode(), backend="llguidance/1")


def regex_of(pattern: str) -> GrammarSpec:
    grammar = llguidance.LLMatcher.grammar_from_regex(pattern)
    return GrammarSpec(digest="", payload=grammar.encode(), backend="llguidance/1")


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    runner = open_runner(BUNDLED, speculation=SpeculationConfig(method="ngram", min_acceptance=0.0))
    yield runner
    runner.close()


def rambling(
    engine: GrammarEngine, matcher: Matcher, limit: int, *, seed: int = 0, num_ahead: int = 0
) -> list[int]:
    """Draws evenly among what the masks allow, which hardly ever ends by itself. The first `num_ahead` masks
    are filled as if drafts had gone before.
    """
    source = np.random.default_rng(seed)
    output: list[int] = []
    while len(output) < limit and not matcher.finished:
        row = engine.fill([(matcher, tuple(matcher.forced()[:num_ahead]))]).result().masks[0]
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        output.append(int(source.choice(allowed)))
        matcher.accept(output[-1:])
    return output


@pytest.mark.parametrize("limit", [100, 400])
@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_ends_validly_within_its_limit(
    engine: GrammarEngine, tokenizer: tokenizers.Tokenizer, name: str, limit: int
) -> None:
    for seed in range(3):
        output = rambling(engine, engine.matcher(spec_of(SCHEMAS[name]), [], limit), limit, seed=seed)
        text = tokenizer.decode(output, skip_special_tokens=True)
        validator = jsonschema_rs.validator_for(SCHEMAS[name], validate_formats=True)
        assert not list(validator.iter_errors(json.loads(text)))


@pytest.mark.parametrize("pattern", ["[a-z ]+\\.", "(yes|no), [a-z]*", '("[a-z]*" ?)*[0-9]{4}-[0-9]{2}'])
def test_a_regex_ends_too(engine: GrammarEngine, tokenizer: tokenizers.Tokenizer, pattern: str) -> None:
    output = rambling(engine, engine.matcher(regex_of(pattern), [], 60), 60)
    assert re.fullmatch(pattern, tokenizer.decode(output, skip_special_tokens=True))


def test_without_a_limit_it_rambles(engine: GrammarEngine) -> None:
    matcher = engine.matcher(spec_of(PERSON), [])
    rambling(engine, matcher, 100)
    assert not matcher.finished


def test_a_limit_that_is_just_enough_is_met_and_a_smaller_one_changes_nothing(engine: GrammarEngine) -> None:
    grammar = spec_of(PERSON)
    least, before = 40, 0
    while least != before:
        before, least = least, len(rambling(engine, engine.matcher(grammar, [], least), least))
    exact = engine.matcher(grammar, [], least)
    assert len(rambling(engine, exact, least)) == least
    assert exact.finished
    free, short = engine.matcher(grammar, []), engine.matcher(grammar, [], 8)
    assert rambling(engine, short, 8) == rambling(engine, free, 8)
    assert not short.finished


@pytest.mark.parametrize("name", ["object", "array"])
def test_drafts_replay_and_copies_find_the_same_end(engine: GrammarEngine, name: str) -> None:
    grammar, limit = spec_of(SCHEMAS[name]), 150
    output = rambling(engine, engine.matcher(grammar, [], limit), limit)
    assert rambling(engine, engine.matcher(grammar, [], limit), limit, num_ahead=32) == output
    for place in range(0, len(output), 7):
        resumed = engine.matcher(grammar, output[:place], limit)
        rolled = resumed.copy()
        rolled.accept(output[place : place + 20])
        rolled.rollback(len(output[place : place + 20]))
        for matcher in (resumed, rolled):
            for token in output[place:]:
                row = engine.fill([(matcher, ())]).result().masks[0]
                again = engine.matcher(grammar, [], limit)
                assert row[token >> 5] >> (token & 31) & 1
                matcher.accept([token])
            assert matcher.finished
            del again


def hot(seed: int, limit: int) -> SamplingParams:
    return SamplingParams(temperature=1.5, seed=seed, max_tokens=limit)


def jobs_of(prompt: list[int], **options: object) -> list[Job]:
    return [
        Job(prompt, num_tokens=90, grammar=spec_of(schema), sampling=hot(seed, 90), **options)
        for seed, schema in enumerate([PERSON, SCHEMAS["array"], SCHEMAS["anything"]])
    ]


def test_batch_speculation_and_resuming_change_no_token(
    runner: ModelRunner, tokenizer: tokenizers.Tokenizer
) -> None:
    prompt = tokenizer.encode("Describe a person:").ids
    together = Driver(runner).run(jobs_of(prompt))
    alone = [Driver(runner).run([job])[0] for job in jobs_of(prompt)]
    drafted = Driver(runner).run(jobs_of(prompt, speculate=True))
    assert all(job.grammar_finished for job in together)
    assert len(together[0].output) > 60
    resumed = []
    for place, job in enumerate(jobs_of(prompt)):
        known = together[place].output
        job.output = known[: max(0, len(known) - 9)]
        resumed += Driver(runner).run([job])
    for others in (alone, drafted, resumed):
        assert [job.output for job in others] == [job.output for job in together]
    assert sum(job.num_steps for job in drafted) < sum(job.num_steps for job in together)


def test_a_banned_token_is_not_led_to(runner: ModelRunner, tokenizer: tokenizers.Tokenizer) -> None:
    bias = {tokenizer.token_to_id('"'): float("-inf")}
    sampling = SamplingParams(temperature=1.0, max_tokens=20, logit_bias=bias)
    prompt = tokenizer.encode("Hello").ids
    grammar = regex_of('[a-z]*"')
    job = Driver(runner).run([Job(prompt, num_tokens=20, grammar=grammar, sampling=sampling)])[0]
    assert not job.failure
    assert len(job.output) == 20
