"""A served model that is asked whether an answer is right: how likely it says yes, or the grade it gives.

As a verifier that generates (Zhang et al., arXiv 2408.15240) it needs no head that pools: any model that
chats may judge. Each answer is a request of its own, with a row in the ledger, below the request that asks.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

from contract.chat import ChoiceFormat, Conversation, Message, Role
from contract.errors import MillraceError, Reason
from contract.outputs import TokenLogprobs
from contract.sampling import SamplingOptions
from gateway.pipeline.delta import ChoiceDelta
from gateway.test_time import ballots
from gateway.test_time.asked import Begin
from gateway.types.deliberation import ScorerSpec
from gateway.types.request import GenerationRequest

# Answers that are judged at a time: each is a stream of the tenant.
_TOGETHER = 4
# Alternatives among which yes and no are looked for, and tokens of a verdict and of a grade.
_TOP, _VERDICT_TOKENS, _GRADE_TOKENS = 20, 8, 32
_YES, _NO = "Yes", "No"
_SHOWN = "Question:\n{question}\n\nProposed answer:\n{answer}\n\n"
_IS_RIGHT = "Is the proposed answer correct? Answer Yes or No, and nothing else."
_HOW_GOOD = (
    "How good is the proposed answer, from {least:g} (wrong) to {most:g} (right and complete)? Answer with "
    "the number, and nothing else."
)


class VerifierScorer:
    """Scores from 0 to 1: the share of yes in the probability of yes and no, or the grade in its bounds."""

    enough: float | None = None

    def __init__(self, question: str, spec: ScorerSpec, asking: GenerationRequest, begin: Begin) -> None:
        """`asking` is a request to the model, but for its prompt and what depends on it."""
        self._question = question
        self._spec = spec
        self._asking = asking
        self._begin = begin
        self.num_tokens = 0

    async def score(self, texts: Sequence[str]) -> list[float]:
        """See AnswerScorer."""
        turn = asyncio.Semaphore(_TOGETHER)
        judge = self._verdict if self._spec.minimum is None else self._grade
        tasks = [asyncio.create_task(self._judged(turn, judge, text)) for text in texts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _judged(
        self, turn: asyncio.Semaphore, judge: Callable[[str], Awaitable[float]], text: str
    ) -> float:
        if not text.strip():
            return -math.inf
        async with turn:
            return await judge(text)

    async def _verdict(self, text: str) -> float:
        form = ChoiceFormat((_YES, _NO))
        said, first = await self._answer(text, _IS_RIGHT, _VERDICT_TOKENS, logprobs=_TOP, form=form)
        found = None if first is None else likelihood(*first)
        if found is None:
            raise _no_judge(f"it says neither yes nor no: {said[:80]!r}")
        return found

    async def _grade(self, text: str) -> float:
        least, most = self._spec.minimum, self._spec.maximum
        assert least is not None, "as admitted"
        assert most is not None, "as admitted"
        said, _ = await self._answer(text, _HOW_GOOD.format(least=least, most=most), _GRADE_TOKENS)
        number = ballots.last_number(said)
        if number is None or not least <= float(number) <= most:
            raise _no_judge(f"it gives no number between {least:g} and {most:g}: {said[:80]!r}")
        return (float(number) - least) / (most - least)

    async def _answer(
        self,
        text: str,
        task: str,
        max_tokens: int,
        *,
        logprobs: int | None = None,
        form: ChoiceFormat | None = None,
    ) -> tuple[str, tuple[TokenLogprobs, Callable[[int], str]] | None]:
        """What it says, and its first token with what turns ids into texts."""
        content = _SHOWN.format(question=self._question, answer=text) + task
        request = _asked(self._asking, content, max_tokens, logprobs, form)
        said = ChoiceDelta()
        async with await self._begin(request) as attempt:
            while deltas := await attempt.drain():
                attempt.first_chunk_written()
                for delta in deltas:
                    said.absorb(delta)
            self.num_tokens += attempt.usage().prompt_tokens + attempt.usage().billed_tokens
            texts = attempt.reader.texts
        if not said.logprobs:
            return said.content, None
        return said.content, (said.logprobs[0], lambda each: texts.raw(each).decode("utf-8", "replace"))


def likelihood(token: TokenLogprobs, text_of: Callable[[int], str]) -> float | None:
    """The share of yes among the tokens with which yes or no begins; None where there are none."""
    chances = {_YES: 0.0, _NO: 0.0}
    for token_id, logprob in {token.token_id: token.logprob, **dict(token.top)}.items():
        begun = text_of(token_id).strip().lower()
        for word in chances:
            if begun and word.lower().startswith(begun):
                chances[word] += math.exp(logprob)
    total = math.fsum(chances.values())
    return chances[_YES] / total if total else None


def _asked(
    asking: GenerationRequest, content: str, max_tokens: int, logprobs: int | None, form: ChoiceFormat | None
) -> GenerationRequest:
    return GenerationRequest(
        model=asking.model,
        prompt=Conversation(
            messages=(Message(role=Role.USER, content=content),),
            # Families whose templates know the word judge at once.
            template_options={"enable_thinking": False},
        ),
        sampling=SamplingOptions(temperature=0.0, max_tokens=max_tokens, logprobs=logprobs),
        response_format=form,
        service_tier=asking.service_tier,
        metadata=asking.metadata,
        face=asking.face,
        field_names=asking.field_names,
        streaming=False,
        allow_fallback=False,
    )


def _no_judge(problem: str) -> MillraceError:
    return MillraceError(Reason.INTERNAL, problem)
