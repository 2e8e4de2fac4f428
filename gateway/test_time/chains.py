"""Strategies whose parts follow each other, and the questions that they ask: a larger model where the first
one is doubted, and critiques of a draft.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from contract.chat import Conversation, Message, Role, ToolChoice, ToolChoiceMode
from gateway.test_time import ballots
from gateway.test_time.asked import Question
from gateway.test_time.branch import AnswerPart
from gateway.test_time.confidence import Groups
from gateway.test_time.strategies import NOTHING, Decision, Grown, Sample, Samples
from gateway.types.deliberation import Deliberation
from gateway.types.request import GenerationRequest

# Tokens over which a draft's probability is taken: one that is unlikely alone is no doubt.
_WINDOW = 16
_CRITIQUE = (
    "Check your last answer step by step, against everything that was asked. Name each mistake and how it is "
    "mended. If nothing is wrong, end with a line that says only: NOTHING IS WRONG"
)
_REVISE = "Write your answer again, with these mistakes mended. Write nothing but the answer."
# A critique's last line, its letters alone.
_SETTLED = "nothing is wrong"
_NO_LETTERS = re.compile(r"[\W\d_]+")


class Escalate(Samples):
    """The first model's answer, or that of a larger one where it is doubted (cascades, as FrugalGPT, arXiv
    2305.05176). It is doubted as soon as the tokens of any window are less probable than `confidence`, in the
    geometric mean; or where a scorer gives less than that.
    """

    def __init__(self, confidence: float, *, rates: bool) -> None:
        super().__init__(2)
        self.watches = not rates
        self._rates = rates
        self._confidence = confidence
        self._least = math.log(confidence)
        self._groups = Groups()
        # The draft was ended before its end.
        self._is_doubted = False
        # Why it goes on from there; "" while it does not.
        self._goes_on_by = ""

    def begin(self) -> Decision:
        """See Strategy."""
        return self._begin(1)

    def _grown(self, event: Grown) -> Decision:
        if event.index or 0 in self._ended:
            return NOTHING
        num_before = len(self._groups)
        self._groups.add(event.confidences)
        # With its last tokens it is judged as a whole.
        if event.is_over or len(self._groups) < _WINDOW or self._weakest(num_before) >= self._least:
            return NOTHING
        self._is_doubted = True
        self._ended[0] = Sample(index=0, is_complete=False, num_tokens=len(self._groups))
        return Decision(start=self._begin(1).start, end=(0,))

    def _weakest(self, since: int = 0) -> float:
        return self._groups.weakest(_WINDOW, since=since)

    def _after(self, sample: Sample) -> Decision:
        if sample.index:
            return self._after_larger(sample)
        if self._rates and sample.is_complete:
            return Decision(rate=(0,))
        is_sure = not self._rates and len(self._groups) > 0 and self._weakest() >= self._least
        if sample.is_answer and is_sure:
            return Decision(winner=0, ended_by="decided")
        return self._begin(1)

    def _after_larger(self, sample: Sample) -> Decision:
        if self._goes_on_by:
            return self._conclude(self._goes_on_by)
        if not sample.is_answer and self._is_doubted:
            return self._go_on("failure")
        return self._conclude("all_samples" if sample.is_answer else "failure")

    def _unaffordable(self) -> Decision:
        return self._go_on("budget") if self._is_doubted else self._conclude("budget")

    def _go_on(self, by: str) -> Decision:
        """Nobody else answers: the draft goes on from where it was doubted."""
        self._goes_on_by = by
        self._num_begun += 1
        return Decision(start=1, parents=(0,))

    def _rated(self, scores: Mapping[int, float]) -> Decision:
        if scores[0] >= self._confidence:
            return Decision(winner=0, ended_by="decided")
        return self._begin(1)

    def _best(self) -> int | None:
        answers = [each for each in self._ended.values() if each.is_answer]
        complete = [each.index for each in answers if each.is_complete]
        return max(complete or [each.index for each in answers], default=None)


class CritiqueRevise(Samples):
    """The last of several drafts, each but the first written after a critique of the one before (Self-Refine,
    arXiv 2303.17651). It is over when a critique finds nothing. Drafts have even numbers, critiques odd ones.
    """

    def __init__(self, num_drafts: int) -> None:
        super().__init__(2 * num_drafts - 1)

    def begin(self) -> Decision:
        """See Strategy."""
        return self._begin(1)

    def _after(self, sample: Sample) -> Decision:
        is_critique = bool(sample.index % 2)
        if not sample.is_complete:
            # Of a draft that was cut, and of half a critique, nothing better comes.
            return self._conclude("all_samples" if sample.is_answer else "failure")
        if is_critique and sample.vote == _SETTLED:
            return self._conclude("decided")
        if not is_critique and not sample.has_text:
            # Calls of tools are made, not talked about.
            return self._conclude("decided")
        return self._begin(1) if self._num_begun < self._num_samples else self._conclude("all_samples")

    def _best(self) -> int | None:
        drafts = [each for each in self._ended.values() if not each.index % 2 and each.is_answer]
        complete = [each.index for each in drafts if each.is_complete]
        return max(complete or [each.index for each in drafts], default=None)


def settled_by(pattern: Any) -> Callable[[str], str | None]:
    """Reads critiques: whether one says that nothing is wrong, by its last line or by a client's pattern."""

    def vote(text: str) -> str | None:
        if pattern is not None:
            return _SETTLED if ballots.searched(pattern, text) is not None else None
        last = next((line for line in reversed(text.splitlines()) if _NO_LETTERS.sub("", line)), "")
        said = _NO_LETTERS.sub(" ", last).strip().lower()
        return _SETTLED if said == _SETTLED else None

    return vote


def questions_of(
    request: GenerationRequest, ask: Deliberation, max_tokens: int, pattern: Any
) -> Callable[[Sequence[AnswerPart]], Question | None]:
    """The question that follows the parts before it; None for the request itself, which comes first."""
    # Its caller has the salt of the request already. Its prompt may be longer: the answer has what is left.
    sampling = replace(request.sampling, max_tokens=max_tokens, prompt_logprobs=None)
    plain = replace(
        request,
        sampling=sampling,
        test_time=None,
        cache_salt=None,
        streaming=False,
        allow_fallback=False,
        fills_context=True,
        num_prompts=1,
    )
    vote = settled_by(pattern)

    def question(before: Sequence[AnswerPart]) -> Question | None:
        if not before:
            return None
        if ask.strategy == "escalate":
            names = {**request.field_names, "model": request.field("test_time.model")}
            return Question(replace(plain, model=ask.model, field_names=names), "answer", ask.model)
        if len(before) % 2:
            asked = _after(plain, (Role.ASSISTANT, before[-1].text), (Role.USER, _CRITIQUE))
            quiet = replace(asked.prompt, tool_choice=ToolChoice(mode=ToolChoiceMode.NONE))
            sampling = replace(asked.sampling, logprobs=None, stop=())
            asked = replace(asked, prompt=quiet, sampling=sampling, response_format=None)
            return Question(asked, "critique", vote=vote)
        turns = [(Role.ASSISTANT, before[-2].text), (Role.USER, _CRITIQUE)]
        turns += [(Role.ASSISTANT, before[-1].text), (Role.USER, _REVISE)]
        return Question(_after(plain, *turns), "revision")

    return question


def _after(request: GenerationRequest, *turns: tuple[Role, str]) -> GenerationRequest:
    """The request with further turns: what stands before them is in the engine's cache."""
    prompt = request.prompt
    assert isinstance(prompt, Conversation), "as admitted"
    more = tuple(Message(role=role, content=content) for role, content in turns)
    return replace(request, prompt=replace(prompt, messages=prompt.messages + more))
