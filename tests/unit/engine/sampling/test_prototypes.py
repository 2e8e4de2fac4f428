"""Matchers made beside the steps: whose turn it is, copies, failures, and what is kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import llguidance
import pytest

from engine.sampling import prototypes
from engine.sampling.prototypes import Prototypes

BUNDLED = Path("models/millrace-nano")
DIGITS = llguidance.LLMatcher.grammar_from_regex("[0-9]{3}").encode()


@pytest.fixture(scope="module")
def build() -> Callable[[bytes], llguidance.LLMatcher]:
    tokenizer = llguidance.LLTokenizer((BUNDLED / "tokenizer.json").read_text())

    def make(payload: bytes) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(tokenizer, payload.decode(), log_level=0)

    return make


def eventually(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.001)


class Gate:
    """Makes what it is asked for when it is let, and notes in which order."""

    def __init__(self, build: Callable[[bytes], llguidance.LLMatcher]) -> None:
        self._build = build
        self.open = threading.Event()
        self.order: list[bytes] = []

    def __call__(self, payload: bytes) -> llguidance.LLMatcher:
        self.order.append(payload)
        self.open.wait()
        return self._build(DIGITS)


def test_tenants_take_turns(build: Callable[[bytes], llguidance.LLMatcher]) -> None:
    gate = Gate(build)
    made = Prototypes(gate)
    flood = [b"flood %d" % index for index in range(20)]
    for payload in flood:
        assert not made.is_ready(payload, "many")
    eventually(lambda: gate.order)
    assert not made.is_ready(b"one", "few")
    gate.open.set()
    eventually(lambda: all(made.is_ready(payload, "many") for payload in flood))
    # One of the flood was under way, and one more had its turn before.
    assert gate.order.index(b"one") <= 2
    assert len(gate.order) == 21
    made.close()


def test_everybody_gets_a_matcher_of_their_own(build: Callable[[bytes], llguidance.LLMatcher]) -> None:
    calls: list[bytes] = []
    made = Prototypes(lambda payload: (calls.append(payload), build(payload))[1])
    eventually(lambda: made.is_ready(DIGITS, "a"))
    assert made.is_ready(DIGITS, "b")
    first, second = made.take(DIGITS), made.take(DIGITS)
    mask = first.compute_bitmask()
    token = next(index for index in range(len(mask) * 8) if mask[index // 8] >> (index % 8) & 1)
    assert first.consume_token(token)
    assert second.compute_bitmask() == made.take(DIGITS).compute_bitmask() == mask
    assert first.compute_bitmask() == mask
    first.consume_tokens([token, token])
    assert first.compute_bitmask() != mask
    assert calls == [DIGITS]
    made.close()


def test_under_another_digest_the_same_grammar_is_made_again(
    build: Callable[[bytes], llguidance.LLMatcher],
) -> None:
    calls: list[bytes] = []
    made = Prototypes(lambda payload: (calls.append(payload), build(payload))[1])
    eventually(lambda: made.is_ready(DIGITS, "a", "of a"))
    assert not made.is_ready(DIGITS, "b", "of b")
    eventually(lambda: made.is_ready(DIGITS, "b", "of b"))
    assert made.take(DIGITS, "of a").compute_bitmask() == made.take(DIGITS, "of b").compute_bitmask()
    assert calls == [DIGITS, DIGITS]
    made.close()


def test_a_failure_is_told_to_who_takes_it() -> None:
    def fail(payload: bytes) -> llguidance.LLMatcher:
        raise ValueError(payload.decode())

    made = Prototypes(fail)
    eventually(lambda: made.is_ready(b"bad", "a"))
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            made.take(b"bad")
    # It is not remembered: who comes next tries again.
    assert not made.is_ready(b"bad", "a")
    made.close()


def test_what_was_not_used_for_long_goes_first(
    build: Callable[[bytes], llguidance.LLMatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prototypes, "_MAX_KEPT", 2)
    calls: list[bytes] = []
    made = Prototypes(lambda payload: (calls.append(payload), build(DIGITS))[1])
    for payload in (b"a", b"b", b"a", b"c", b"a", b"b"):
        made.take(payload)
    assert calls == [b"a", b"b", b"c", b"b"]
    monkeypatch.setattr(prototypes, "_MAX_BYTES", 3)
    made.take(b"dd")
    made.take(b"ee")
    assert made.take(b"ee")
    assert calls[-2:] == [b"dd", b"ee"]
    made.close()
