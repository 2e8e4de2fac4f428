"""The outputs of one request's texts, from a model that pools: a few submissions after one another.

All texts are accepted before the first is submitted, but no engine gets more of them at a time than keep it
busy: who sends many waits for himself, and others' requests do not wait behind all of his. What was submitted
together is lost together, and goes to another engine without the texts that have been answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import msgspec

from contract.engines import CancelReason
from contract.errors import MillraceError, Reason
from gateway.engines.attachment import Leg
from gateway.engines.continuation import ContinuousStream
from gateway.engines.fleet import Fleet
from gateway.engines.types import EngineOutput, Submission, SubmittedText

# Tokens of a request that are under way at a time: several steps of an engine. Half of them are one
# submission.
TOGETHER = 16_384
# A text costs an engine as much as so many tokens beside its own.
_TEXT_TOKENS = 8


class TextStream(ContinuousStream):
    """Outputs of one submission of texts; each ends the text of its index."""

    def __init__(self, fleet: Fleet, submission: Submission, **options: Any) -> None:
        super().__init__(fleet, submission, **options)
        self._unsent = deque(submission.texts)
        # What a lost leg had, and what each text counts that has no output yet.
        self._texts: dict[Leg, Sequence[SubmittedText]] = {}
        self._under_way: dict[int, int] = {}

    @staticmethod
    def _choices_of(submission: Submission) -> Iterable[int]:
        return (text.index for text in submission.texts)

    def start(self) -> None:
        """Submits the first texts; see `ContinuousStream.start`."""
        self._submission = self._fleet.adapters.asked_for(self._submission)
        self._submit(_of(self._submission, self._next_texts()), 0)

    def cancel(self, reason: CancelReason) -> None:
        """See `ContinuousStream.cancel`."""
        self._unsent.clear()
        super().cancel(reason)

    def _go_on(self) -> None:
        super()._go_on()
        while self._unsent and sum(self._under_way.values()) < TOGETHER // 2:
            if not self._fleet.takers(self._submission):
                if not self._under_way:
                    self._await_engine()
                return
            # Accepted is accepted: these have waited for the first.
            self._submit(_of(self._renewed(), self._next_texts()), 0)

    def _next_texts(self) -> list[SubmittedText]:
        texts: list[SubmittedText] = []
        num_tokens = 0
        while self._unsent and num_tokens < TOGETHER // 2:
            texts.append(self._unsent.popleft())
            num_tokens += _weight(texts[-1])
        return texts

    def _submit(self, submission: Submission, num_losses: int) -> Leg:
        leg = super()._submit(submission, num_losses)
        self._texts[leg] = submission.texts
        self._under_way |= {text.index: _weight(text) for text in submission.texts}
        return leg

    def _note(self, output: EngineOutput) -> None:
        super()._note(output)
        self._under_way.pop(output.choice_index, None)

    def _continuations(self, leg: Leg) -> list[Submission]:
        left = [text for text in self._texts.pop(leg) if text.index in self._tokens]
        return [_of(self._renewed(), left)] if left else []

    def _told(self, error: MillraceError, choice_index: int) -> MillraceError:
        """In the caller's name for the text at fault."""
        if error.field.startswith("prompt") or error.reason is Reason.POISONED_REQUEST:
            rest = error.field.removeprefix("prompt_token_ids").removeprefix("prompt")
            error = MillraceError(
                error.reason,
                error.message,
                field=f"texts[{choice_index}]{rest}",
                metadata=error.metadata,
                retry_after_s=error.retry_after_s,
            )
        return super()._told(error, choice_index)


def _weight(text: SubmittedText) -> int:
    return len(text.token_ids) + _TEXT_TOKENS


def _of(submission: Submission, texts: Sequence[SubmittedText]) -> Submission:
    """The submission of some of its texts."""
    ids = tuple(chain.from_iterable(text.token_ids for text in texts))
    return msgspec.structs.replace(submission, prompt_token_ids=ids, texts=tuple(texts))
