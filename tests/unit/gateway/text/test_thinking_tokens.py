"""Thoughts stand between tokens: what clients see of them is what engines count, in every family."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.thinking import Thought
from contract.vocabulary import DecoderKind
from gateway.text.choice import ChoiceText, TextOptions, shown_ids
from gateway.text.delta import TextDelta
from gateway.text.detokenizer import TokenTexts, Vocabulary
from gateway.text.thinking import thinking_tags

SPECIAL = {
    "think": ("<think>", "</think>"),
    "gemma4": ("<|channel>", "<channel|>"),
    "harmony": ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
}
WORDS = ("assistant", "analysis", "final", "thought", "\n\n")


def vocabulary(form: str) -> Vocabulary:
    tokens = (
        *(bytes([value]) for value in range(256)),
        *(each.encode() for each in (*SPECIAL[form], *WORDS)),
    )
    return Vocabulary(
        fingerprint="",
        decoder=DecoderKind.BYTE_LEVEL,
        tokens=tokens,
        special_ids=frozenset() if form == "think" else frozenset(range(256, 256 + len(SPECIAL[form]))),
        reasoning_format=form,
    )


def ids_of(form: str, *pieces: str) -> list[int]:
    """Pieces that are tokens as such; any other, and those in a list's place, byte by byte."""
    known = {text.decode(): token for token, text in enumerate(vocabulary(form).tokens) if token > 255}
    return [each for piece in pieces for each in ([known[piece]] if piece in known else list(piece.encode()))]


def spelled(text: str) -> list[int]:
    return list(text.encode())


def read(
    form: str, ids: list[int], cuts: list[int] | None = None, opened: bool = False
) -> tuple[str, str, int]:
    """(content, thoughts, tokens of thoughts)"""
    known = vocabulary(form)
    tags = thinking_tags(known)
    assert tags is not None, "a budget can be held"
    options = TextOptions(reasoning_format=form, thinking=tags)
    texts = TokenTexts(known, shown_ids=shown_ids(TokenTexts(known), options))
    choice, total = ChoiceText(texts, options, str), TextDelta()
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts or ()), len(ids)]
    for start, end in itertools.pairwise(bounds):
        choice.feed(ids[start:end], total)
    choice.finish(total)
    engine = Thought(tags, 1 << 30, ())
    engine.read(ids)
    assert choice.num_reasoning_tokens == engine.num_thought, "what is told is what the engine counts"
    return total.content, total.reasoning, choice.num_reasoning_tokens


HARMONY_THOUGHT = ("<|channel|>", "analysis", "<|message|>", "hm?", "<|end|>", "<|start|>", "assistant")
HARMONY_ANSWER = ("<|channel|>", "final", "<|message|>", "yes", "<|return|>")


@pytest.mark.parametrize(
    ("form", "ids", "expected"),
    [
        ("think", ids_of("think", "\n", "<think>", "\nhm?\n", "</think>", "\n\n", "yes"), ("yes", "hm?", 6)),
        # Tags that are spelled are text, wherever they stand.
        ("think", spelled("<think>hm?</think>yes"), ("<think>hm?</think>yes", "", 0)),
        ("think", [*ids_of("think", "<think>"), *spelled("a</think>b")], ("", "a</think>b", 10)),
        (
            "think",
            [*ids_of("think", "<think>"), *spelled("</think>"), *ids_of("think", "</think>", "yes")],
            ("yes", "</think>", 9),
        ),
        ("think", ids_of("think", "yes", "<think>", "no"), ("yes<think>no", "", 0)),
        (
            "gemma4",
            ids_of("gemma4", "<|channel>", "thought", "\n", "hm?", "<channel|>", "yes"),
            ("yes", "hm?", 4),
        ),
        # The name in other tokens is hidden as well, and counted.
        (
            "gemma4",
            ids_of("gemma4", "<|channel>", "though", "t\nhm?", "<channel|>", "yes"),
            ("yes", "hm?", 12),
        ),
        (
            "gemma4",
            ids_of("gemma4", "<|channel>", "thought", "\n\n", "hm?", "<channel|>", "yes"),
            ("yes", "hm?", 5),
        ),
        ("gemma4", spelled("<|channel>thought\nhm?<channel|>"), ("<|channel>thought\nhm?<channel|>", "", 0)),
        # Headers are no thoughts.
        ("harmony", ids_of("harmony", *HARMONY_THOUGHT, *HARMONY_ANSWER), ("yes", "hm?", 4)),
        (
            "harmony",
            ids_of("harmony", *HARMONY_THOUGHT, *HARMONY_THOUGHT, *HARMONY_ANSWER),
            ("yes", "hm?hm?", 8),
        ),
        ("harmony", ids_of("harmony", *HARMONY_ANSWER), ("yes", "", 0)),
        (
            "harmony",
            [*ids_of("harmony", *HARMONY_THOUGHT[:3]), *spelled("<|end|>a"), *ids_of("harmony", "<|end|>")],
            ("", "<|end|>a", 9),
        ),
    ],
)
def test_thoughts_are_what_stands_between_tokens(
    form: str, ids: list[int], expected: tuple[str, str, int]
) -> None:
    assert read(form, ids) == expected
    assert read(form, ids, list(range(len(ids)))) == expected


@pytest.mark.parametrize("form", SPECIAL)
@given(data=st.data())
def test_any_mix_is_counted_as_engines_do_and_the_same_at_every_cut(form: str, data: st.DataObject) -> None:
    parts = [*SPECIAL[form], *WORDS, "\n", "hm", "é"]
    pieces = data.draw(st.lists(st.sampled_from(parts), max_size=14))
    ids = [
        each
        for piece in pieces
        for each in (ids_of(form, piece) if data.draw(st.booleans()) else spelled(piece))
    ]
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=5))
    assert read(form, ids) == read(form, ids, cuts)


def test_the_way_to_an_answer_is_found_in_the_vocabulary() -> None:
    tags = thinking_tags(vocabulary("harmony"))
    assert tags is not None
    answer = ids_of("harmony", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>")
    assert [tags.close_id, *tags.answer] == [*ids_of("harmony", "<|end|>"), *answer]
    assert [tags.open_id, *tags.open_rest] == ids_of("harmony", "<|channel|>", "analysis", "<|message|>")
    gemma = thinking_tags(vocabulary("gemma4"))
    assert gemma is not None
    assert [*gemma.name] == ids_of("gemma4", "thought", "\n")
    assert (gemma.blank_line, gemma.answer) == ((), ())
