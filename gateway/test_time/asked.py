"""Parts of an answer that requests of their own compute: of another model, or of another prompt.

Such a request is one as any: accepted, limited, billed and traced, with a row of its own in the ledger under
the same request id. Its answer is passed on as its own attempt has read it, because it may have
another vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from msgspec.structs import replace

from contract.engines import CancelReason
from contract.outputs import FinishReason
from gateway.engines.types import EngineOutput
from gateway.pipeline.attempt import Attempt
from gateway.pipeline.call import Call
from gateway.pipeline.delta import ChoiceDelta, ReadOutput
from gateway.test_time.branch import AnswerPart
from gateway.types.deliberation import TokensOfModel
from gateway.types.request import Caller, GenerationRequest


class Question(NamedTuple):
    """What is asked by a request of its own."""

    request: GenerationRequest
    # See AnswerPart.
    part: str
    model: str | None = None
    # What its answer votes for.
    vote: Callable[[str], str | None] = lambda text: None


Begin = Callable[[GenerationRequest], Awaitable[Attempt]]


class AskedAnswer(AnswerPart):
    """The answer to a question. `run` until it has ended."""

    def __init__(self, index: int, question: Question, begin: Begin) -> None:
        super().__init__(index)
        self.model, self.part = question.model, question.part
        self._question = question
        self._begin = begin
        self._attempt: Attempt | None = None
        self._deltas: list[ChoiceDelta] = []

    async def run(self, report: Callable[[], None]) -> None:
        """Asks, and takes what is answered; raises why there is no answer. `report` hears of every piece."""
        async with await self._begin(self._question.request) as attempt:
            self._attempt = attempt
            while deltas := await attempt.drain():
                attempt.first_chunk_written()
                if self.is_open:
                    self._take(deltas)
                report()
        if self.is_open:
            self.num_tokens = attempt.usage().billed_tokens
            finish = next((each.finish_reason for each in self._deltas if each.finish_reason), None)
            self.close(finish or FinishReason.STOP)
            self.vote = self._question.vote(self.text) if self.is_complete else None

    def _take(self, deltas: Iterable[ChoiceDelta]) -> None:
        assert self._attempt is not None, "its deltas come from it"
        if not self.first_output_s:
            self.first_output_s = time.monotonic()
        for delta in deltas:
            self._said.absorb_text(delta)
            self._deltas.append(delta)
        self.num_tokens = self._attempt.usage().billed_tokens

    def _end(self, reason: CancelReason) -> None:
        if self._attempt is not None:
            self._attempt.cancel()

    @property
    def engine(self) -> str:
        """See AnswerPart."""
        return "" if self._attempt is None else self._attempt.engine

    @property
    def tpot_s(self) -> float | None:
        """See AnswerPart."""
        rate = None if self._attempt is None else self._attempt.meter.tokens_per_s
        return 1 / rate if rate else None

    @property
    def spent(self) -> TokensOfModel:
        """Tokens so far."""
        name = self._question.request.model
        if self._attempt is None:
            return TokensOfModel(model=name)
        usage = self._attempt.usage()
        return TokensOfModel(
            model=name,
            prompt_tokens=usage.prompt_tokens,
            cached_prompt_tokens=usage.cached_prompt_tokens,
            completion_tokens=usage.billed_tokens,
            reasoning_tokens=usage.reasoning_tokens,
        )

    def pieces(self) -> list[EngineOutput]:
        """See AnswerPart."""
        deltas = list(self._deltas)
        if not deltas or deltas[-1].finish_reason is None:
            deltas.append(ChoiceDelta(finish_reason=FinishReason.LENGTH))
        return [ReadOutput(0, [], finish_reason=each.finish_reason, delta=each) for each in deltas]


def within(call: Call) -> Caller:
    """Who asks on behalf of a call: below its span, from now on, until the same deadline, with rows that are
    none of a batch's lines.
    """
    return replace(call.caller, trace=call.span, received_s=time.monotonic(), entry_ids=None)


def spent_by_model(all_spent: Iterable[TokensOfModel]) -> list[TokensOfModel]:
    """The sums of what was spent on each model, in the order in which they were asked."""
    sums: dict[str, TokensOfModel] = {}
    for each in all_spent:
        sums[each.model] = sums.get(each.model, TokensOfModel(model=each.model)) + each
    return list(sums.values())
