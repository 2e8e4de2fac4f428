"""A thought with a budget as a matcher: masks hold the sequence to its end, alone or around a grammar.

Everything that works under a grammar (drafts, forced tokens, beams, steps in flight) works so for thoughts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from contract.thinking import Thought
from engine.sampling.grammar import Matcher


class ThinkingMatcher:
    """Where one sequence stands in its thought and, where there is one, in its grammar, which reads thoughts
    as well. See Matcher for what each method means.
    """

    def __init__(self, thought: Thought, output: Sequence[int], grammar: Matcher | None = None) -> None:
        """`output` was read by the grammar already, and is read by the thought here."""
        self._thought, self._grammar = thought, grammar
        self._output = list(output)
        self._read_again()

    @property
    def finished(self) -> bool:
        return self._grammar is not None and self._grammar.finished

    @property
    def is_over(self) -> bool:
        """The sequence needs no matcher any more."""
        return self._grammar is None and self._thought.is_over

    def accept(self, tokens: Sequence[int]) -> int:
        count = len(tokens) if self._grammar is None else self._grammar.accept(tokens)
        self._moved(tokens[:count])
        return count

    def try_accept(self, token: int) -> bool:
        if not self.valid_prefix((token,)):
            return False
        if self._grammar is not None and not self._grammar.try_accept(token):
            return False
        self._moved((token,))
        return True

    def rollback(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        if self._grammar is not None:
            self._grammar.rollback(num_tokens)
        del self._output[-num_tokens:]
        self._read_again()

    def forced(self) -> list[int]:
        chain = list(self._thought.walk())
        if self._grammar is None:
            return chain
        return chain[: self._grammar.valid_prefix(chain)] or self._grammar.forced()

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        count = self._thought.valid_prefix(tokens)
        return count if self._grammar is None else self._grammar.valid_prefix(tokens[:count])

    def fill(self, masks: NDArray[np.int32], drafts: Sequence[int]) -> None:
        if self._grammar is None:
            masks[:] = -1
        else:
            self._grammar.fill(masks, drafts)
        ahead = self._thought.copy()
        ahead.bind(masks[0])
        for row, draft in enumerate(drafts, start=1):
            ahead.read((draft,))
            ahead.bind(masks[row])

    def copy(self) -> ThinkingMatcher:
        made = copy.copy(self)
        made._thought, made._output = self._thought.copy(), list(self._output)
        made._grammar = None if self._grammar is None else self._grammar.copy()
        return made

    def _moved(self, tokens: Sequence[int]) -> None:
        self._output += tokens
        self._thought.read(tokens)

    def _read_again(self) -> None:
        self._thought.restart()
        self._thought.read(self._output)
