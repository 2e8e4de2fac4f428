"""Guided decoding: which tokens a grammar allows next, and where it stands.

The payload is llguidance's serialized grammar (made by the tokenizer service); a Matcher walks it along the
tokens of one sequence. Masks are filled in a thread of their own while the forward runs; llguidance releases
the GIL.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import llguidance
import llguidance.numpy
import numpy as np
from numpy.typing import NDArray

from engine.types import GrammarSpec
from services.vocabulary import whole_tokenizer_json

BACKEND = "llguidance/1"


class GrammarError(Exception):
    """A grammar that cannot be followed; the sequence fails and no other one does."""


class Matcher:
    """Where one sequence stands in its grammar."""

    def __init__(self, inner: llguidance.LLMatcher) -> None:
        self._inner = inner

    @property
    def finished(self) -> bool:
        """No token but the end may follow."""
        return bool(self._inner.is_stopped())

    def accept(self, tokens: Sequence[int]) -> int:
        """Moves along tokens up to the grammar's end; returns how many that were. Raises GrammarError when
        one is not allowed.
        """
        for place, token in enumerate(tokens):
            if place and self.finished:
                return place
            self._accept(token)
        return len(tokens)

    def _accept(self, token: int) -> None:
        if not self._inner.consume_token(token):
            raise GrammarError(f"grammar: {_reason(self._inner) or 'a token outside the grammar'}")

    def try_accept(self, token: int) -> bool:
        """Moves along one token if it is allowed; a refused one leaves the state as it was."""
        return self._inner.validate_tokens([token]) == 1 and bool(self._inner.consume_token(token))

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens."""
        if num_tokens:
            self._inner.rollback(num_tokens)

    def forced(self) -> list[int]:
        """Tokens that must come next, when the grammar leaves no choice and tokenization is unambiguous."""
        return [] if self.finished else list(self._inner.compute_ff_tokens())

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` the grammar would accept from here."""
        return int(self._inner.validate_tokens(list(tokens)))

    def fill(self, masks: NDArray[np.int32], drafts: Sequence[int]) -> None:
        """Writes masks [1 + len(drafts), W] for the next token and for the one after each draft.

        A row after a draft that the grammar refuses allows everything: its draw is never used. The state is
        left as it was. Raises GrammarError when the grammar breaks.
        """
        masks[1:] = -1
        moved = 0
        for row in range(len(drafts) + 1):
            self._fill_row(masks, row)
            if row == len(drafts) or self._inner.validate_tokens([drafts[row]]) != 1:
                break
            self._inner.consume_token(drafts[row])
            moved += 1
        if moved:
            self._inner.rollback(moved)

    def copy(self) -> Matcher:
        """An independent matcher at the same place."""
        return Matcher(self._inner.deep_copy())

    def _fill_row(self, masks: NDArray[np.int32], row: int) -> None:
        if self._inner.is_error():
            raise GrammarError(f"grammar: {_reason(self._inner)}")
        llguidance.numpy.fill_next_token_bitmask(self._inner, masks, row)
        if self._inner.is_error():
            raise GrammarError(f"grammar: {_reason(self._inner)}")


class GrammarEngine:
    """Builds matchers for one tokenizer and fills masks beside the forward. The tokenizer is read when first
    needed.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.folder = folder
        self.vocab_size = vocab_size
        self.eos_token_ids = list(eos_token_ids)
        self.mask_width = -(-vocab_size // 32)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    def matcher(self, grammar: GrammarSpec, output: Sequence[int]) -> Matcher:
        """A matcher that has walked along `output`. Raises GrammarError."""
        if grammar.backend != BACKEND:
            raise GrammarError(f"grammar: back end {grammar.backend!r} is not supported, only {BACKEND!r}")
        inner = llguidance.LLMatcher(self._load_tokenizer(), grammar.payload.decode(), log_level=0)
        if inner.is_error():
            raise GrammarError(f"grammar: {_reason(inner)}")
        matcher = Matcher(inner)
        matcher.accept(output)
        return matcher

    def fill(self, wanted: list[tuple[Matcher, tuple[int, ...]]]) -> Future[GrammarMasks]:
        """Starts filling the masks of matchers, each with its drafts; one row per draft and one more."""
        return self._thread.submit(self._fill, wanted)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()

    def _fill(self, wanted: list[tuple[Matcher, tuple[int, ...]]]) -> GrammarMasks:
        started = time.monotonic()
        rows = sum(len(drafts) + 1 for _, drafts in wanted)
        masks = np.full((rows, self.mask_width), -1, dtype=np.int32)
        problems: list[str] = []
        at = 0
        for matcher, drafts in wanted:
            problem = ""
            try:
                matcher.fill(masks[at : at + len(drafts) + 1], drafts)
            except GrammarError as error:
                problem = str(error)
            problems.append(problem)
            at += len(drafts) + 1
        return GrammarMasks(masks, problems, time.monotonic() - started)

    def _load_tokenizer(self) -> llguidance.LLTokenizer:
        if self._tokenizer is None:
            path = self.folder / "tokenizer.json"
            try:
                text = whole_tokenizer_json(self.folder)
            except (OSError, ValueError) as error:
                raise GrammarError(f"grammar: guided decoding needs {path}: {error}") from error
            eos = self.eos_token_ids or None
            self._tokenizer = llguidance.LLTokenizer(text, n_vocab=self.vocab_size, eos_token=eos)
        return self._tokenizer


class GrammarMasks:
    """Masks of one step: rows in the order asked, a problem (or "") per matcher, and the time it took."""

    def __init__(self, masks: NDArray[np.int32], problems: list[str], seconds: float) -> None:
        self.masks = masks
        self.problems = problems
        self.seconds = seconds


def _reason(inner: llguidance.LLMatcher) -> str:
    """What llguidance says is wrong, without the dump of its state that follows on further lines."""
    return str(inner.get_error()).split("\n", 1)[0]
