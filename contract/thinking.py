"""A budget for what a model thinks, kept to the token: what must come next so that a thought ends in time.

Counted are the tokens after the opening tag, up to and with the closing one; a thought that the prompt has
begun counts from the first token of the output. At the end of the budget the thought is closed as its family
does it: where a line break follows the opening tag, one comes before the closing tag and a blank line after
it. All of it is a function of the tokens so far, so another engine goes on where one has stopped.

The standard library alone is used here, because vLLM's interpreter, which lacks the suite, imports this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# Tokens that the rest of a character may take, which a grammar wants to be whole before the closing tag.
_CHARACTER = 3


@dataclass(frozen=True, kw_only=True)
class ThinkingTags:
    """How one model opens and closes a thought, in tokens, and where the prompt has left it."""

    # The opening tag; None where it is no token of its own, and a thought is begun by the prompt alone.
    open_id: int | None
    close_id: int
    # The prompt has begun a thought.
    opened: bool
    # Tokens of nothing but line breaks, that of a single one first.
    line_breaks: Sequence[int] = ()
    # A blank line, as the model writes it.
    blank_line: Sequence[int] = ()

    @property
    def least(self) -> int:
        """The smallest budget that a thought can be closed in."""
        return 2 if self.line_breaks else 1


class _State(NamedTuple):
    # None before the thought begins or is left out, then whether it goes on.
    thinks: bool | None
    num_thought: int = 0
    # Whether the thought began with a line break, once that is known; and whether it ends with one now.
    is_broken: bool | None = None
    at_break: bool = False
    # What follows a closing tag that was forced.
    pending: tuple[int, ...] = ()


class Thought:
    """Where one output stands. With a `grammar` that wants whole characters a thought may end a few tokens
    before its budget.
    """

    def __init__(
        self, tags: ThinkingTags, budget: int, prompt: Sequence[int], *, has_grammar: bool = False
    ) -> None:
        self._tags, self._budget = tags, budget
        self._breaks = frozenset(tags.line_breaks)
        self._reserve = _CHARACTER if has_grammar else 0
        is_broken = bool(prompt) and prompt[-1] in self._breaks if tags.opened else None
        self._start = self._state = _State(True if tags.opened else None, 0, is_broken, bool(is_broken))

    @property
    def is_over(self) -> bool:
        """Nothing will be forced any more."""
        return self._state.thinks is False and not self._state.pending

    @property
    def num_free(self) -> int:
        """So many tokens may come before one can be forced."""
        if self._state.pending:
            return 0
        return max(0, self._budget - self._state.num_thought - 2 - self._reserve)

    def copy(self) -> Thought:
        """An independent one in the same place."""
        made = object.__new__(Thought)
        made.__dict__ |= self.__dict__
        return made

    def restart(self) -> None:
        """Back to before the first token."""
        self._state = self._start

    def read(self, tokens: Iterable[int]) -> None:
        """Moves along tokens, whether they were forced or not."""
        for token in tokens:
            if self.is_over:
                return
            self._state = self._after(token)

    def forced(self) -> int | None:
        """The token that must come next, where one must."""
        state = self._state
        if state.pending:
            return state.pending[0]
        left = self._budget - state.num_thought - self._reserve
        if not state.thinks or left > 2:
            return None
        if self._tags.line_breaks and state.is_broken is not False and not state.at_break:
            # With one left there is no room for it.
            return self._tags.line_breaks[0] if left + self._reserve >= 2 else self._tags.close_id
        return self._tags.close_id if left < 2 or state.at_break else None

    def _after(self, token: int) -> _State:
        state = self._state
        if state.pending:
            rest = state.pending[1:] if token == state.pending[0] else ()
            return state._replace(pending=rest)
        if state.thinks is None:
            if token == self._tags.open_id:
                return _State(True)
            # The tag may come after line breaks, and after nothing else.
            return state if token in self._breaks else _State(False)
        if token == self._tags.close_id:
            is_forced = self.num_free == 0 and state.is_broken is not False
            return _State(False, pending=tuple(self._tags.blank_line) if is_forced else ())
        at_break = token in self._breaks
        is_broken = at_break if state.is_broken is None else state.is_broken
        return _State(True, state.num_thought + 1, is_broken, at_break)

    # Masks: rows of 32 tokens a word, of numpy or torch.

    def bind(self, row: Any) -> None:
        """Leaves in a row of a mask the forced token alone. One that the grammar in the row does not allow
        waits: there a character is not whole, or the grammar leads to its own end.
        """
        token = self.forced()
        if token is None:
            return
        word, bit = token >> 5, token & 31
        if int(row[word]) >> bit & 1:
            row[:] = 0
            row[word] = 1 << bit if bit < 31 else -(1 << 31)

    def walk(self) -> Iterator[int]:
        """The tokens that must come next, one after another."""
        ahead = self.copy()
        while (token := ahead.forced()) is not None:
            yield token
            ahead.read((token,))

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` may come next."""
        ahead = self.copy()
        for index, token in enumerate(tokens):
            if ahead.forced() not in (None, token):
                return index
            ahead.read((token,))
        return len(tokens)
