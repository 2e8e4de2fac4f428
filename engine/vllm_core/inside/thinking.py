"""A budget of thoughts at vLLM: a grammar of its structured output, alone or around the suite's.

So it holds under whatever vLLM does with grammars: drafts, steps in flight, preemption.
"""

from __future__ import annotations

from typing import Any

from contract.thinking import ThinkingTags, Thought


def thought_of(asked: dict[str, Any], *, has_grammar: bool) -> Thought:
    """From what `calls` has written down."""
    tags = ThinkingTags(**asked["tags"])
    return Thought(tags, asked["budget"], asked["prompt"], has_grammar=has_grammar)


class ThinkingGrammar:
    """vLLM's StructuredOutputGrammar. `inner` is the grammar of the answer, which reads thoughts as well."""

    def __init__(self, thought: Thought, inner: Any = None) -> None:
        self._thought, self._inner = thought, inner
        self._output: list[int] = []

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Moves along tokens; whether they are allowed."""
        if self._inner is not None and not self._inner.accept_tokens(request_id, tokens):
            return False
        self._output += tokens
        self._thought.read(tokens)
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """The tokens that may come next; -1 is padding."""
        known = tokens[: tokens.index(-1)] if -1 in tokens else tokens
        known = known[: self._thought.valid_prefix(known)]
        return known if self._inner is None else list(self._inner.validate_tokens(known))

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens."""
        if not num_tokens:
            return
        if self._inner is not None:
            self._inner.rollback(num_tokens)
        del self._output[-num_tokens:]
        self._thought.restart()
        self._thought.read(self._output)

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        """Writes a row of the mask."""
        row = bitmask[batch_index]
        if self._inner is None:
            row[:] = -1
        else:
            self._inner.fill_bitmask(bitmask, batch_index)
        self._thought.bind(row)

    def is_terminated(self) -> bool:
        """Whether nothing but the end may follow."""
        return self._inner is not None and self._inner.is_terminated()

    def reset(self) -> None:
        """Back to the start."""
        if self._inner is not None:
            self._inner.reset()
        self._output.clear()
        self._thought.restart()
