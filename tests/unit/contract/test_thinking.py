"""A thought ends within its budget, however the model goes on, and from wherever it is taken up."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.thinking import ThinkingTags, Thought

OPEN, CLOSE, BREAK, BLANK, END, WORD = 14, 15, 1, 3, 2, 40
TAGS = ThinkingTags(
    open_id=OPEN, close_id=CLOSE, opened=False, line_breaks=(BREAK, BLANK), blank_line=(BLANK,)
)
# Messages: 20 to 26 are start, assistant, channel, analysis, message, final, end.
START, ROLE, CHANNEL, ANALYSIS, MESSAGE, FINAL, ENDS = range(20, 27)
LEAD, HEADER = [START, ROLE], [CHANNEL, ANALYSIS, MESSAGE]
ANSWER = [*LEAD, CHANNEL, FINAL, MESSAGE]
MESSAGES = ThinkingTags(
    open_id=CHANNEL,
    open_rest=(ANALYSIS, MESSAGE),
    close_id=ENDS,
    opened=False,
    lead=tuple(LEAD),
    answer=tuple(ANSWER),
    other_ends=(START, CHANNEL),
)
NAMED = ThinkingTags(
    open_id=OPEN, close_id=CLOSE, opened=False, line_breaks=(BREAK, BLANK), name=(WORD + 1, BREAK)
)
OPENED = ThinkingTags(
    open_id=OPEN, close_id=CLOSE, opened=True, line_breaks=(BREAK, BLANK), blank_line=(BLANK,)
)


def written(thought: Thought, wanted: list[int], length: int) -> list[int]:
    """An output of a model that wants to write `wanted` over and over, and a word where it may not."""
    output: list[int] = []
    while len(output) < length:
        forced, next_one = thought.forced(), wanted[len(output) % len(wanted)]
        if next_one == thought.excluded():
            next_one = WORD
        output.append(next_one if forced is None else forced)
        thought.read(output[-1:])
    return output


@pytest.mark.parametrize(
    ("tags", "prompt", "wanted", "budget", "expected"),
    [
        # As the family writes it: a line break on both sides of the thought, and a blank line.
        (TAGS, [], [OPEN, BREAK, WORD, WORD, WORD], 5, [OPEN, BREAK, WORD, WORD, BREAK, CLOSE, BLANK]),
        (OPENED, [9, BREAK], [WORD], 4, [WORD, WORD, BREAK, CLOSE, BLANK, WORD]),
        # A family that writes none.
        (TAGS, [], [OPEN, WORD, WORD], 3, [OPEN, WORD, WORD, CLOSE, WORD]),
        (OPENED, [9], [WORD], 2, [WORD, CLOSE, WORD, WORD]),
        # A line break that is there already.
        (OPENED, [9, BREAK], [BREAK], 3, [BREAK, CLOSE, BLANK, BREAK]),
        # Once it was closed by force, it is not closed again.
        (TAGS, [], [OPEN, BREAK, WORD, WORD, 7, CLOSE], 3, [OPEN, BREAK, CLOSE, BLANK, 7, WORD]),
        # It closes by itself, does not think, or comes to its tag after line breaks.
        (TAGS, [], [OPEN, BREAK, CLOSE, WORD], 9, [OPEN, BREAK, CLOSE, WORD, OPEN, BREAK]),
        (TAGS, [], [WORD, OPEN], 2, [WORD, OPEN] * 4),
        (TAGS, [], [BREAK, BLANK, OPEN, WORD], 2, [BREAK, BLANK, OPEN, BREAK, CLOSE, BLANK, OPEN]),
        # The whole way to the answer is forced, and neither it nor a header is a thought.
        (MESSAGES, [], [*HEADER, WORD, WORD, WORD, WORD], 3, [*HEADER, WORD, WORD, ENDS, *ANSWER, WORD]),
        (MESSAGES, [], [*HEADER, WORD], 1, [*HEADER, ENDS, *ANSWER]),
        # It closes by itself, and goes on as it likes; thoughts of all messages are one budget.
        (
            MESSAGES,
            [],
            [*HEADER, WORD, ENDS, *LEAD, *HEADER, WORD, WORD, WORD],
            4,
            [*HEADER, WORD, ENDS, *LEAD, *HEADER, WORD, ENDS, *ANSWER],
        ),
        # What is spelled in other tokens, or stands elsewhere, is no header.
        (MESSAGES, [], [CHANNEL, WORD, MESSAGE, WORD], 1, [CHANNEL, WORD, MESSAGE, WORD] * 2),
        (MESSAGES, [], [WORD, *HEADER, WORD], 1, [WORD, *HEADER, WORD] * 2),
        # A thought's name is no thought, and its line break asks for none at the end.
        (
            NAMED,
            [],
            [OPEN, WORD + 1, BREAK, WORD, WORD],
            3,
            [OPEN, WORD + 1, BREAK, WORD, WORD, CLOSE, WORD + 1],
        ),
        (NAMED, [], [OPEN, WORD], 2, [OPEN, WORD, CLOSE, WORD, OPEN]),
    ],
)
def test_the_end_is_the_familys_own(
    tags: ThinkingTags, prompt: list[int], wanted: list[int], budget: int, expected: list[int]
) -> None:
    assert written(Thought(tags, budget, prompt), wanted, len(expected)) == expected


@given(
    opened=st.booleans(),
    budget=st.integers(2, 12),
    seed=st.integers(0, 1 << 20),
    cut=st.integers(0, 30),
    has_grammar=st.booleans(),
)
def test_no_budget_is_passed_and_every_place_is_found_again(
    opened: bool, budget: int, seed: int, cut: int, has_grammar: bool
) -> None:
    tags, draw = OPENED if opened else TAGS, random.Random(seed)
    words = [WORD, BREAK, BLANK, 7, 8, 9] + [CLOSE] * draw.randrange(2)
    wanted = ([] if opened else [OPEN]) + draw.choices(words, k=40)
    output = written(Thought(tags, budget, [BREAK], has_grammar=has_grammar), wanted, 40)
    begun = output if opened else output[1:]
    assert begun.index(CLOSE) + 1 <= budget, "the closing tag is counted"
    again = Thought(tags, budget, [BREAK], has_grammar=has_grammar)
    again.read(output[:cut])
    ahead = list(again.walk())
    assert ahead == output[cut : cut + len(ahead)]
    assert not ahead or again.num_free == 0
    free = output[cut : cut + again.num_free]
    before = again.copy()
    for token in free:
        assert before.forced() is None, "so many tokens were said to be free"
        before.read((token,))
    assert again.valid_prefix(output[cut:]) == len(output[cut:])


def test_no_thought_is_opened_once_the_budget_is_spent() -> None:
    thought = Thought(MESSAGES, 2, [])
    thought.read([*HEADER, WORD, ENDS, *ANSWER, WORD, ENDS])
    assert (thought.num_thought, thought.is_over, thought.forced()) == (2, False, None)
    assert thought.excluded() is None
    assert thought.num_free == 3
    assert thought.valid_prefix([*LEAD, *HEADER]) == 3
    assert thought.valid_prefix([*LEAD, CHANNEL, FINAL, MESSAGE]) == 5
    thought.read([*LEAD, CHANNEL])
    assert (thought.excluded(), thought.num_free) == (ANALYSIS, 0)
    row = np.full(2, -1, np.int32)
    thought.bind(row)
    assert [bit for bit in range(64) if not int(row[bit >> 5]) >> (bit & 31) & 1] == [ANALYSIS]
    # A grammar that allows nothing else is not left without a token.
    alone = np.zeros(2, np.int32)
    alone[0] = 1 << ANALYSIS
    kept = alone.copy()
    thought.bind(alone)
    np.testing.assert_array_equal(alone, kept)


@given(budget=st.integers(1, 9), seed=st.integers(0, 1 << 20), cut=st.integers(0, 60))
def test_thoughts_of_many_messages_keep_one_budget(budget: int, seed: int, cut: int) -> None:
    draw = random.Random(seed)
    parts: list[list[int]] = [
        [*LEAD, *HEADER],
        ANSWER,
        [WORD],
        [WORD],
        [ENDS],
        [START],
        [CHANNEL],
        [ANALYSIS],
    ]
    thought, output, num_thought = Thought(MESSAGES, budget, []), list[int](), 0
    wanted = [*HEADER, *(token for _ in range(30) for token in draw.choice(parts))]
    for token in wanted:
        forced = thought.forced()
        free = FINAL if token == thought.excluded() else token
        output.append(free if forced is None else forced)
        num_thought += bool(thought.thinks)
        thought.read(output[-1:])
    assert num_thought == thought.num_thought <= budget
    again = Thought(MESSAGES, budget, [])
    again.read(output[:cut])
    assert again.valid_prefix(output[cut:]) == len(output[cut:])
    before = again.copy()
    for token in output[cut : cut + again.num_free]:
        assert (before.forced(), before.excluded()) == (None, None)
        before.read((token,))


@pytest.mark.parametrize("token", [CLOSE, 31, 32, 63])
def test_a_mask_keeps_the_forced_token_where_the_grammar_allows_it(token: int) -> None:
    tags = ThinkingTags(open_id=None, close_id=token, opened=True)
    thought, row = Thought(tags, 1, []), np.full(2, -1, np.int32)
    thought.bind(row)
    assert [bit for bit in range(64) if int(row[bit >> 5]) >> (bit & 31) & 1] == [token]
    forbidden = row.copy()
    forbidden ^= -1
    kept = forbidden.copy()
    thought.bind(forbidden)
    np.testing.assert_array_equal(forbidden, kept)
