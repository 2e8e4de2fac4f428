"""What followed wherever a text's end was seen before, in texts of any number and length.

A suffix automaton (Blumer et al., 1985) of several texts: each state stands for the passages that end at the
same places, and its link leads to the longest suffix of them that was seen elsewhere as well. To read a token
takes constant time on average, in building as in matching, however long the texts are, and the states are at
most twice as many as the tokens. How often a passage was seen decides between its continuations, as in
SuffixDecoding (Oliaro et al., arXiv 2411.04975).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

_ROOT, _NONE = 0, -1
# Suffixes whose count a token raises. Only a text that repeats itself has more, and its shortest ones are not
# what decides.
_COUNTED = 32


@dataclass(slots=True)
class Match:
    """The longest end of a text that an automaton knows: its state and how many tokens it has."""

    state: int = _ROOT
    length: int = 0


class SuffixAutomaton:
    """Texts, and their passages by what they end with."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._links, self._lengths, self._counts = array("q", [_NONE]), array("q", [0]), array("q", [0])
        # Most states have one continuation, which needs no table of its own.
        self._tokens, self._nexts = array("q", [_NONE]), array("q", [_NONE])
        self._branches: dict[int, dict[int, int]] = {}
        self._last = _ROOT

    @property
    def num_states(self) -> int:
        """What its memory is in proportion to."""
        return len(self._links)

    def begin(self) -> None:
        """What is read from here on is another text."""
        self._last = _ROOT

    def read(self, token: int) -> None:
        """The text's next token."""
        self.num_tokens += 1
        state = self._last = self._extended(token)
        for _ in range(_COUNTED):
            if state == _ROOT:
                break
            self._counts[state] += 1
            state = self._links[state]

    def follow(self, match: Match, tokens: Iterable[int]) -> None:
        """Moves a match along the tokens that its text goes on with."""
        for token in tokens:
            state, length = match.state, match.length
            # A shorter passage may have been set apart since.
            while state != _ROOT and length <= self._lengths[self._links[state]]:
                state = self._links[state]
            following = self._next(state, token)
            while following == _NONE and state != _ROOT:
                state = self._links[state]
                length = self._lengths[state]
                following = self._next(state, token)
            match.state = _ROOT if following == _NONE else following
            match.length = 0 if following == _NONE else length + 1

    def likely(self, match: Match, most: int, least_share: float) -> list[int]:
        """Up to `most` tokens, each the most frequent one behind those before it, while all of them together
        followed at least `least_share` of the times that the matched passage was seen.
        """
        found: list[int] = []
        state, seen = match.state, 0
        while state != _ROOT and match.length <= self._lengths[self._links[state]]:
            state = self._links[state]
        if state == _ROOT:
            return found
        seen = self._counts[state]
        while len(found) < most:
            token, following = self._most_frequent(state)
            if following == _NONE or self._counts[following] < least_share * seen:
                break
            found.append(token)
            state = following
        return found

    def _most_frequent(self, state: int) -> tuple[int, int]:
        branches = self._branches.get(state)
        if branches is None:
            return self._tokens[state], self._nexts[state]
        # Among equals the latest one to be seen first.
        return max(reversed(branches.items()), key=lambda item: self._counts[item[1]])

    def _extended(self, token: int) -> int:
        last = self._last
        known = self._next(last, token)
        if known != _NONE:
            # Another text has the same passage.
            return (
                known if self._lengths[known] == self._lengths[last] + 1 else self._split(last, token, known)
            )
        new = self._add(self._lengths[last] + 1, _ROOT)
        state = last
        while state != _NONE and self._next(state, token) == _NONE:
            self._lead(state, token, new)
            state = self._links[state]
        if state != _NONE:
            known = self._next(state, token)
            whole = self._lengths[known] == self._lengths[state] + 1
            self._links[new] = known if whole else self._split(state, token, known)
        return new

    def _split(self, state: int, token: int, known: int) -> int:
        """Sets the shorter passages of `known` apart, which `state` leads to."""
        shorter = self._add(self._lengths[state] + 1, self._links[known], self._counts[known])
        self._tokens[shorter], self._nexts[shorter] = self._tokens[known], self._nexts[known]
        if known in self._branches:
            self._branches[shorter] = dict(self._branches[known])
        self._links[known] = shorter
        while state != _NONE and self._next(state, token) == known:
            self._lead(state, token, shorter)
            state = self._links[state]
        return shorter

    def _add(self, length: int, link: int, count: int = 0) -> int:
        self._lengths.append(length)
        self._links.append(link)
        self._counts.append(count)
        self._tokens.append(_NONE)
        self._nexts.append(_NONE)
        return len(self._links) - 1

    def _next(self, state: int, token: int) -> int:
        branches = self._branches.get(state)
        if branches is not None:
            return branches.get(token, _NONE)
        return self._nexts[state] if self._tokens[state] == token else _NONE

    def _lead(self, state: int, token: int, to: int) -> None:
        branches = self._branches.get(state)
        if branches is not None:
            branches[token] = to
        elif self._tokens[state] in {_NONE, token}:
            self._tokens[state], self._nexts[state] = token, to
        else:
            self._branches[state] = {self._tokens[state]: self._nexts[state], token: to}
