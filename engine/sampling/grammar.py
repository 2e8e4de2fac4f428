"""Guided decoding: which tokens a grammar allows next, and where it stands.

The payload is llguidance's serialized grammar (made by the tokenizer service); a Matcher walks it along the
tokens of one sequence. Masks are filled in a thread of their own while the forward runs, and matchers made in
another (see prototypes); llguidance releases the GIL. Near a sequence's token limit the masks lead to the
grammar's end (see closing).
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import llguidance
import llguidance.numpy
import numpy as np
from numpy.typing import NDArray

from checkpoint.grammar_tokens import grammar_tokenizer_json
from checkpoint.vocabulary import whole_tokenizer_json
from contract.grammar_cost import PARSER_LIMITS
from engine.sampling.closing import ClosingMark, EndFinder, first_mark, margin
from engine.sampling.prototypes import Prototypes
from engine.types import GrammarSpec
from runtime.errors import ConfigError

BACKEND = "llguidance/1"


class GrammarError(Exception):
    """A grammar that cannot be followed; the sequence fails and no other one does."""


class FillsMasks(Protocol):
    """What says which tokens may come next."""

    def fill(self, masks: NDArray[np.int32], drafts: Sequence[int]) -> None:
        """See Matcher."""


class Matcher:
    """Where one sequence stands in its grammar.

    With a `limit` of output tokens it leads to the grammar's end before that; 0 has no limit.
    """

    def __init__(self, inner: llguidance.LLMatcher, finder: EndFinder | None = None, limit: int = 0) -> None:
        # Where all outputs begin; it is only copied.
        self._start = inner
        self._inner = inner.deep_copy()
        self._finder = finder if limit else None
        self._limit = limit
        self._output: list[int] = []
        # Ends that were looked for, by position; the last one counts.
        self._marks = [first_mark(limit)]

    @property
    def finished(self) -> bool:
        """No token but the end may follow."""
        return bool(self._inner.is_stopped())

    def accept(self, tokens: Sequence[int]) -> int:
        """Moves along tokens up to the grammar's end; returns how many that were. Raises GrammarError when
        one is not allowed.
        """
        for index, token in enumerate(tokens):
            if index and self.finished:
                return index
            self._accept(token)
        return len(tokens)

    def _accept(self, token: int) -> None:
        # Whether the draw used the mask or not, so that a replay finds the same marks.
        self._look_for_end()
        if not self._inner.consume_token(token):
            raise GrammarError(f"grammar: {_reason(self._inner) or 'a token outside the grammar'}")
        self._moved(token)

    def try_accept(self, token: int) -> bool:
        """Moves along one token if it is allowed; a refused one leaves the state as it was."""
        if self._inner.validate_tokens([token]) != 1:
            return False
        self._look_for_end()
        self._moved(token)
        return bool(self._inner.consume_token(token))

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens: those before them are read again, because the library's own way back
        does not lead to every state. White space that may go on is read as if it had ended.
        """
        if not num_tokens:
            return
        del self._output[-num_tokens:]
        self._inner = self._start.deep_copy()
        self._inner.consume_tokens(self._output)
        while self._marks[-1].position > len(self._output):
            self._marks.pop()

    def forced(self) -> list[int]:
        """Tokens that must come next: the way to the end near the limit, or what the grammar leaves no choice
        in and tokenizes unambiguously.
        """
        if end := self._end():
            return list(end)
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
        self._fill_row(masks, 0)
        if not drafts:
            return
        ahead = self.copy()
        for row, draft in enumerate(drafts, start=1):
            if not ahead.try_accept(draft):
                break
            ahead._fill_row(masks, row)

    def copy(self) -> Matcher:
        """An independent matcher in the same state."""
        copied = copy.copy(self)
        copied._inner = self._inner.deep_copy()
        copied._output, copied._marks = list(self._output), list(self._marks)
        return copied

    def _fill_row(self, masks: NDArray[np.int32], row: int) -> None:
        if self._inner.is_error():
            raise GrammarError(f"grammar: {_reason(self._inner)}")
        self._look_for_end()
        if end := self._end():
            masks[row] = 0
            masks.view(np.uint32)[row, end[0] >> 5] = 1 << (end[0] & 31)
            return
        llguidance.numpy.fill_next_token_bitmask(self._inner, masks, row)
        if self._inner.is_error():
            raise GrammarError(f"grammar: {_reason(self._inner)}")

    def _look_for_end(self) -> None:
        """Decides for the current position whether the end begins; does nothing when that is decided."""
        if self._finder is None:
            return
        position, mark = len(self._output), self._marks[-1]
        left = self._limit - position
        if mark.end or left > mark.next_check or left <= 0 or self.finished:
            return
        end = self._finder.find(self._inner, self._output, left)
        if end is None:
            self._marks.append(ClosingMark(position, left - max(1, left // 4)))
            return
        spare = left - len(end) - margin(self._limit)
        if spare <= 0:
            self._marks.append(ClosingMark(position, 0, end))
        else:
            # The next search is at a third of the spare tokens, because each token until then may lengthen
            # the end by two more.
            self._marks.append(ClosingMark(position, left - max(1, spare // 3)))

    def _end(self) -> tuple[int, ...]:
        """The tokens that have to follow, if the end has begun."""
        mark = self._marks[-1]
        return mark.end[len(self._output) - mark.position :] if mark.end else ()

    def _moved(self, token: int) -> None:
        strayed = bool(end := self._end()) and token != end[0]
        self._output.append(token)
        if strayed:
            # Replayed tokens may come from elsewhere.
            self._marks.append(ClosingMark(len(self._output), self._limit))


class GrammarEngine:
    """Builds matchers for one tokenizer and fills masks beside the forward. The tokenizer is read when first
    needed, or ahead of that.
    """

    def __init__(self, checkpoint: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.checkpoint = checkpoint
        self.vocab_size = vocab_size
        self.eos_token_ids = list(eos_token_ids)
        self.mask_width = -(-vocab_size // 32)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._finder: EndFinder | None = None
        self._loading = threading.Lock()
        self._prototypes = Prototypes(self._build)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    def read_ahead(self) -> threading.Thread:
        """Reads the tokenizer in a thread; what it cannot read fails the requests that need it."""

        def read() -> None:
            with contextlib.suppress(GrammarError):
                self._load_tokenizer()

        thread = threading.Thread(target=read, name="grammar-tokenizer", daemon=True)
        thread.start()
        return thread

    def is_ready(self, grammar: GrammarSpec, tenant: str) -> bool:
        """Whether `matcher` has only to copy; if not, what it needs is made in a thread, tenants in turns."""
        return grammar.backend != BACKEND or self._prototypes.is_ready(
            grammar.payload, tenant, grammar.digest
        )

    def matcher(self, grammar: GrammarSpec, output: Sequence[int], limit: int = 0) -> Matcher:
        """A matcher that has walked along `output`, and ends within `limit` output tokens where it can; 0 is
        no limit. Raises GrammarError.
        """
        if grammar.backend != BACKEND:
            raise GrammarError(f"grammar: back end {grammar.backend!r} is not supported, only {BACKEND!r}")
        matcher = Matcher(self._prototypes.take(grammar.payload, grammar.digest), self._finder, limit)
        matcher.accept(output)
        return matcher

    def _build(self, payload: bytes) -> llguidance.LLMatcher:
        limits = llguidance.LLParserLimits(**PARSER_LIMITS)
        inner = llguidance.LLMatcher(self._load_tokenizer(), payload.decode(), log_level=0, limits=limits)
        if inner.is_error():
            raise GrammarError(f"grammar: {_reason(inner)}")
        return inner

    def fill(self, wanted: Sequence[tuple[FillsMasks, tuple[int, ...]]]) -> Future[GrammarMasks]:
        """Starts filling the masks of matchers, each with its drafts; one row per draft and one more."""
        return self._thread.submit(self._fill, wanted)

    def close(self) -> None:
        """Ends the threads."""
        self._prototypes.close()
        self._thread.shutdown()

    def _fill(self, wanted: Sequence[tuple[FillsMasks, tuple[int, ...]]]) -> GrammarMasks:
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
        with self._loading:
            if self._tokenizer is None:
                try:
                    text = grammar_tokenizer_json(whole_tokenizer_json(self.checkpoint))
                except ConfigError as error:
                    raise GrammarError(f"grammar: guided decoding needs the tokenizer: {error}") from error
                eos = self.eos_token_ids or None
                tokenizer = llguidance.LLTokenizer(text, n_vocab=self.vocab_size, eos_token=eos)
                self._finder = EndFinder(tokenizer, self.vocab_size)
                self._tokenizer = tokenizer
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
