"""A budget for what a model thinks, kept to the token: what must come next so that a thought ends in time.

A thought is what stands between tokens: tags that are spelled as text open and close none. Counted are the
tokens after the opening tag, up to and with the closing one; a thought that the prompt has begun counts from
the first token of the output. At the end of the budget the thought is closed as its family does it: where a
line break follows the opening tag, one comes before the closing tag and a blank line after it; where answers
are messages of their own (harmony), the answer's header follows, and what no thought may open any more is
excluded. All of it is a function of the tokens so far, so another engine goes on where one has stopped.

The standard library alone is used here, because vLLM's interpreter, which lacks the suite, imports this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# Tokens that the rest of a character may take, which a grammar wants to be whole before the closing tag.
_CHARACTER = 3
# A budget that no output reaches.
UNBOUNDED = 1 << 62


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
    # What must follow the first token of the opening tag, and what may, which is no thought.
    open_rest: Sequence[int] = ()
    name: Sequence[int] = ()
    # Begins another message, in which thoughts may go on; empty where an answer has one thought.
    lead: Sequence[int] = ()
    # Opens the answer, from the message's lead on, behind a thought that had to be closed.
    answer: Sequence[int] = ()
    # Tokens that end a thought as well as the closing tag.
    other_ends: Sequence[int] = ()

    @property
    def least(self) -> int:
        """The smallest budget that a thought can be closed in."""
        return 2 if self.line_breaks and not self.name else 1

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens of which it is made."""
        more = (self.line_breaks, self.blank_line, self.open_rest, self.name, self.lead, self.answer)
        opening = () if self.open_id is None else (self.open_id,)
        return (*opening, self.close_id, *(each for ids in more for each in ids), *self.other_ends)


class _State(NamedTuple):
    # None where a thought may begin, True while it goes on, False once none can come.
    thinks: bool | None
    num_thought: int = 0
    # Whether the thought began with a line break, once that is known; and whether it ends with one now.
    is_broken: bool | None = None
    at_break: bool = False
    # What follows a closing tag that was forced.
    pending: tuple[int, ...] = ()
    # Tokens that have come of a lead with the opening tag behind it; then of the thought's name.
    num_opening: int = 0
    num_name: int = 0
    # The thought had to be closed: what the model itself would close it with later belongs to no thought.
    was_forced: bool = False


class Thought:
    """Where one output stands. With a `grammar` that wants whole characters a thought may end a few tokens
    before its budget.
    """

    def __init__(
        self, tags: ThinkingTags, budget: int, prompt: Sequence[int], *, has_grammar: bool = False
    ) -> None:
        self._tags, self._budget = tags, budget
        self._breaks = frozenset(tags.line_breaks)
        self._ends = frozenset((tags.close_id, *tags.other_ends))
        opening = () if tags.open_id is None else (tags.open_id, *tags.open_rest)
        self._opening = (*tags.lead, *opening)
        # The token of it by which a message becomes a thought.
        self._decisive = len(tags.lead) + (len(opening) > 1)
        self._reserve = _CHARACTER if has_grammar else 0
        is_broken = bool(prompt) and prompt[-1] in self._breaks and not tags.name if tags.opened else None
        self._start = self._state = _State(
            True if tags.opened else None,
            0,
            is_broken,
            bool(is_broken),
            # The prompt has the first message's lead, and the name of a thought that it begins.
            num_opening=len(tags.lead),
            num_name=len(tags.name),
        )

    @property
    def thinks(self) -> bool | None:
        """Whether a thought goes on; None where one may begin."""
        return self._state.thinks

    @property
    def num_thought(self) -> int:
        """Tokens of thoughts so far, closing tags included."""
        return self._state.num_thought

    @property
    def is_over(self) -> bool:
        """Nothing will be forced or excluded any more."""
        state = self._state
        return state.thinks is False and not state.pending and not state.was_forced

    @property
    def num_free(self) -> int:
        """So many tokens may come before one can be forced or excluded."""
        state = self._state
        if state.pending or state.was_forced:
            return 0
        if self._may_not_open:
            return max(0, self._decisive - state.num_opening)
        return max(0, self._left - 2)

    @property
    def _left(self) -> int:
        return self._budget - self._state.num_thought - self._reserve

    @property
    def _may_not_open(self) -> bool:
        """Whether all of the budget was spent on thoughts that have ended."""
        return self._state.thinks is None and self._state.num_thought > 0 and self._left < 1

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
        state, left = self._state, self._left
        if state.pending:
            return state.pending[0]
        if not state.thinks or left > 2:
            return None
        if self._tags.line_breaks and state.is_broken is not False and not state.at_break:
            # With one left there is no room for it.
            return self._tags.line_breaks[0] if left + self._reserve >= 2 else self._tags.close_id
        return self._tags.close_id if left < 2 or state.at_break else None

    def excluded(self) -> int | None:
        """The token that must not come next, where there is one: it would open a thought without a budget, or
        close one a second time.
        """
        if self._state.was_forced:
            return self._tags.close_id
        if not self._may_not_open or self._state.num_opening != self._decisive:
            return None
        return self._opening[self._decisive]

    def _after(self, token: int) -> _State:
        state = self._state
        if state.pending:
            state = state._replace(pending=state.pending[1:] if token == state.pending[0] else ())
        if not state.thinks:
            return state if state.thinks is False else self._outside(state, token)
        if token in self._ends:
            return self._closed(state, token)
        if state.num_name < len(self._tags.name):
            if token == self._tags.name[state.num_name]:
                return state._replace(num_name=state.num_name + 1)
            state = state._replace(num_name=len(self._tags.name))
        at_break = token in self._breaks
        is_broken = at_break if state.is_broken is None else state.is_broken
        return state._replace(num_thought=state.num_thought + 1, is_broken=is_broken, at_break=at_break)

    def _outside(self, state: _State, token: int) -> _State:
        """Where a thought may begin: at once and once, or in any message."""
        opening, matched = self._opening, state.num_opening
        if matched < len(opening) and token == opening[matched]:
            if matched + 1 < len(opening):
                return state._replace(num_opening=matched + 1)
            # The line break of a name is none of the thought.
            return _State(True, state.num_thought, False if self._tags.name else None)
        if self._tags.lead:
            return state._replace(num_opening=int(token == opening[0]))
        # The tag may come after line breaks, and after nothing else.
        return state if token in self._breaks else state._replace(thinks=False)

    def _closed(self, state: _State, token: int) -> _State:
        tags, forced = self._tags, token == self.forced()
        pending: tuple[int, ...] = ()
        if tags.answer:
            pending = tuple(tags.answer) if forced else ()
        elif self.num_free == 0 and state.is_broken is not False:
            pending = tuple(tags.blank_line)
        after = _State(
            None if tags.lead else False,
            state.num_thought + 1,
            pending=pending,
            was_forced=forced and not tags.lead,
        )
        return self._outside(after, token) if token != tags.close_id and tags.lead else after

    # Masks: rows of 32 tokens a word, of numpy or torch.

    def bind(self, row: Any) -> None:
        """Leaves in a row of a mask the forced token alone, or all but the excluded one. One that the grammar
        in the row does not allow waits: there a character is not whole, or the grammar leads to its own end;
        and what it allows alone stays.
        """
        if (token := self.forced()) is not None:
            word, value = token >> 5, _word(1 << (token & 31))
            if int(row[word]) & value:
                row[:] = 0
                row[word] = value
        elif (token := self.excluded()) is not None:
            word, before = token >> 5, int(row[token >> 5])
            row[word] = _word(before & ~(1 << (token & 31)))
            if not (row != 0).any():
                row[word] = before

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
            if ahead.forced() not in (None, token) or token == ahead.excluded():
                return index
            ahead.read((token,))
        return len(tokens)


def _word(bits: int) -> int:
    """32 bits as a signed number, as which words of masks are kept."""
    return ((bits & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
