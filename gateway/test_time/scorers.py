"""Scorers: how good an answer is, from 0 to 1 where it is a check."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from contract.chat import Conversation, Prompt, Role, TextPrompt
from contract.errors import MillraceError, Reason
from contract.grammar import Verdict
from gateway.test_time import ballots
from gateway.types.deliberation import Deliberation, ScorerSpec

# Characters of a conversation's end that a model reads beside an answer.
_QUESTION = 16 * 1024


class AnswerScorer(Protocol):
    """Scores texts."""

    # A score of so much is as good as any; None where only a comparison tells.
    enough: float | None
    # Tokens that it has read, which are billed apart.
    num_tokens: int

    async def score(self, texts: Sequence[str]) -> list[float]:
        """A number for each text, more for a better one; raises MillraceError where it cannot."""
        ...


class CheckScorer:
    """1 for an answer that passes a check made here: a number within bounds, or a pattern found in it."""

    enough: float | None = 1.0
    num_tokens = 0

    def __init__(self, spec: ScorerSpec, pattern: Any) -> None:
        self._spec = spec
        self._pattern = pattern

    async def score(self, texts: Sequence[str]) -> list[float]:
        """See AnswerScorer."""
        return [float(self._passes(text)) for text in texts]

    def _passes(self, text: str) -> bool:
        if self._spec.type == "regex":
            return ballots.searched(self._pattern, text) is not None
        found = ballots.boxed(text) or ballots.last_number(text)
        if found is None or ballots.number(found) is None:
            return False
        least, most, value = self._spec.minimum, self._spec.maximum, float(found)
        return (least is None or value >= least) and (most is None or value <= most)


class SchemaScorer:
    """1 for an answer that is JSON as its schema wants it. The tokenizer service judges, in bounds."""

    enough: float | None = 1.0
    num_tokens = 0

    def __init__(self, validate: Callable[[str], Awaitable[Verdict]]) -> None:
        self._validate = validate

    async def score(self, texts: Sequence[str]) -> list[float]:
        """See AnswerScorer."""
        return [float((await self._validate(ballots.json_value(text) or text)).valid) for text in texts]


class ModelScorer:
    """A served model that scores pairs of question and answer, as `/v1/score` does."""

    enough: float | None = None

    def __init__(
        self, question: str, score: Callable[[list[tuple[str, str]]], Awaitable[tuple[list[float], int]]]
    ) -> None:
        """`score` gives the scores of pairs, and how many tokens were read for them."""
        self._question = question
        self._score = score
        self.num_tokens = 0

    async def score(self, texts: Sequence[str]) -> list[float]:
        """See AnswerScorer."""
        # A text of nothing is no pair: it is the worst answer there is.
        asked = [(self._question, text) for text in texts if text.strip()]
        scores: list[float] = []
        if asked:
            scores, num_tokens = await self._score(asked)
            self.num_tokens += num_tokens
        given = iter(scores)
        return [next(given) if text.strip() else float("-inf") for text in texts]


def question_of(prompt: Prompt) -> str:
    """What a model reads beside an answer: the last message of the user, or the prompt."""
    if isinstance(prompt, Conversation):
        said = [each.content for each in prompt.messages if each.role is Role.USER and each.content.strip()]
        return (said[-1] if said else " ")[-_QUESTION:]
    return (prompt.text if isinstance(prompt, TextPrompt) else " ")[-_QUESTION:]


def unanswered(ask: Deliberation, field: str, error: MillraceError) -> MillraceError:
    """The refusal of a request whose scorer does not answer, or why it is answered plainly instead."""
    spec = ask.scorer
    assert spec is not None, "what scores was asked for"
    what = f"model {spec.model!r}" if spec.model else f"the check {spec.type!r}"
    # What a scorer is refused for is a matter of the request; that it is away is not.
    reason = error.reason if error.mapping.http_status != 500 else Reason.ENGINE_UNAVAILABLE
    remedy = "" if ask.on_failure == "answer" else ", or set on_failure to answer"
    return MillraceError(
        reason,
        f"{field}: {what} does not score: {error.message}; name another one{remedy}",
        field=field,
        retry_after_s=error.retry_after_s,
    )
