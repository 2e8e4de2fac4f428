"""Guided decoding with the bundled tokenizer: masks, replay, drafts, and failures that stay with their
sequence.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import llguidance
import numpy as np
import pytest
import tokenizers

from engine.runner.runner import ModelRunner
from engine.sampling.grammar import GrammarEngine, GrammarError, Matcher
from engine.types import GrammarSpec, SamplingParams
from tests.unit.engine.runner.driver import GREEDY, Driver, Job, open_runner

BUNDLED = Path("models/millrace-nano")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def spec_of(grammar: str, backend: str = "llguidance/1") -> GrammarSpec:
    return GrammarSpec(digest="", payload=grammar.encode(), backend=backend)


JSON_GRAMMAR = spec_of(llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, {"whitespace_flexible": False}))
DIGITS = spec_of(llguidance.LLMatcher.grammar_from_regex("[0-9]{3}"))


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    runner = open_runner(BUNDLED)
    yield runner
    runner.close()


def allowed(engine: GrammarEngine, matcher: Matcher, drafts: tuple[int, ...] = ()) -> list[set[int]]:
    masks = engine.fill([(matcher, drafts)]).result().masks
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def test_mask_follows_the_tokens(engine: GrammarEngine, tokenizer: tokenizers.Tokenizer) -> None:
    digits = {tokenizer.token_to_id(digit) for digit in "0123456789"}
    matcher = engine.matcher(DIGITS, [])
    assert allowed(engine, matcher) == [digits]
    some = next(iter(digits))
    matcher.accept([some, some, some])
    assert allowed(engine, matcher)[0] <= {0, 2}
    assert not digits & allowed(engine, matcher)[0]


def test_drafts_see_their_own_masks_and_leave_no_trace(
    engine: GrammarEngine, tokenizer: tokenizers.Tokenizer
) -> None:
    one = tokenizer.token_to_id("1")
    letter = tokenizer.token_to_id("a")
    matcher = engine.matcher(DIGITS, [one])
    before = allowed(engine, matcher)
    masks = allowed(engine, matcher, (one, one, one))
    assert masks[0] == masks[1] == before[0]
    assert one not in masks[2]
    # After a refused draft anything goes: its row is never used.
    assert letter in allowed(engine, matcher, (letter, one))[1]
    assert allowed(engine, matcher) == before


def test_replay_continues_where_it_was(engine: GrammarEngine, tokenizer: tokenizers.Tokenizer) -> None:
    ids = tokenizer.encode('{"name":"A').ids
    walked = engine.matcher(JSON_GRAMMAR, [])
    for token in ids:
        walked.accept([token])
    replayed = engine.matcher(JSON_GRAMMAR, ids)
    copied = walked.copy()
    assert allowed(engine, walked) == allowed(engine, replayed) == allowed(engine, copied)
    with pytest.raises(GrammarError):
        engine.matcher(DIGITS, ids)


def test_generation_obeys_its_grammar(runner: ModelRunner, tokenizer: tokenizers.Tokenizer) -> None:
    prompt = tokenizer.encode("Name and age of Ada:").ids
    hot = SamplingParams(temperature=1.2, seed=8)
    jobs = Driver(runner).run(
        [
            Job(prompt, num_tokens=80, grammar=JSON_GRAMMAR),
            Job(prompt, num_tokens=80, grammar=JSON_GRAMMAR, sampling=hot),
            Job(prompt, num_tokens=10, grammar=DIGITS),
            Job(prompt, num_tokens=10),
        ]
    )
    for job in jobs[:2]:
        assert job.grammar_finished
        value = json.loads(tokenizer.decode(job.output, skip_special_tokens=True))
        assert set(value) == {"name", "age"}
        assert 0 <= value["age"] <= 99
    assert tokenizer.decode(jobs[2].output).isdigit()
    assert not jobs[3].grammar_finished
    assert jobs[3].output == Driver(runner).run([Job(prompt, num_tokens=10)])[0].output


def test_a_broken_grammar_fails_its_sequence_alone(
    runner: ModelRunner, tokenizer: tokenizers.Tokenizer
) -> None:
    prompt = tokenizer.encode("Hello").ids
    jobs = Driver(runner).run(
        [
            Job(prompt, grammar=spec_of("{not a grammar")),
            Job(prompt, grammar=spec_of("", backend="homegrown/3")),
            Job(prompt, sampling=GREEDY),
        ]
    )
    assert "grammar" in jobs[0].failure
    assert "homegrown/3" in jobs[1].failure
    assert not jobs[2].failure
    assert len(jobs[2].output) == 8


# As the tokenizer service lays schemas out, behind the literal that ends a tool call.
BROKEN_LINES = spec_of(
    json.dumps(
        {
            "grammars": [
                {"name": "call", "lark_grammar": 'start: @value "}\\n"'},
                {
                    "name": "value",
                    "json_schema": {
                        "type": "object",
                        "x-guidance": {
                            "whitespace_flexible": True,
                            "whitespace_pattern": "\\n\\x20{0,32}",
                            "item_separator": ",\\x20?",
                            "key_separator": ":\\x20?",
                        },
                    },
                },
            ]
        }
    )
)


@pytest.mark.parametrize("limit", [0, 40])
def test_drafts_and_what_is_taken_back_leave_no_trace_in_white_space(
    engine: GrammarEngine, tokenizer: tokenizers.Tokenizer, limit: int
) -> None:
    telling = {id_ for text, id_ in tokenizer.get_vocab().items() if set(text) & set('}"Ċ,')}
    for seed in range(60):
        drawn = random.Random(seed)
        walked, plain = (engine.matcher(BROKEN_LINES, [], limit) for _ in range(2))

        def draw(matcher: Matcher, drawn: random.Random = drawn) -> int:
            (may,) = allowed(engine, matcher)
            return drawn.choice(sorted(may & telling or may))

        for _ in range(30):
            if plain.finished:
                break
            ahead, drafts = plain.copy(), []
            while len(drafts) < drawn.randrange(4) and not ahead.finished:
                drafts.append(draw(ahead))
                ahead.accept(drafts[-1:])
            (expected,) = allowed(engine, plain)
            assert allowed(engine, walked, tuple(drafts))[0] == expected
            walked.rollback(walked.accept(drafts))
            (again,) = allowed(engine, walked)
            assert again == expected
            token = draw(plain)
            plain.accept([token])
            walked.accept([token])
