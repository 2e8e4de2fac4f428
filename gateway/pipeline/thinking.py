"""How much may be thought for a request: what it asks for, within its tier's bound and the model's means."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any

import msgspec
from msgspec.structs import replace

from contract.chat import Conversation
from contract.efforts import EFFORT, EFFORTS
from contract.errors import unsupported
from contract.sampling import SamplingParams
from contract.thinking import ThinkingTags
from gateway.config import EffortsConfig
from gateway.pipeline.validate import refuse
from gateway.text.detokenizer import Vocabulary
from gateway.text.thinking import form_of, thinking_tags
from gateway.types.request import GenerationRequest, Prepared

# Tokens of an answer that no budget which was asked for takes: so many, or a quarter of max_tokens.
ANSWER_ROOM = 1024
_FIELD = "max_thinking_tokens"
_EFFORTS = EffortsConfig()


def _effort(request: GenerationRequest) -> Any:
    """What the template is told of it, by whichever field."""
    return request.prompt.template_options.get(EFFORT) if isinstance(request.prompt, Conversation) else None


def is_opened(prepared: Prepared, vocabulary: Vocabulary) -> bool:
    """Whether the template has begun a thought in the prompt."""
    prefix, form = prepared.assistant_prefix, form_of(vocabulary)
    return prefix.rfind(form.open) > prefix.rfind(form.close)


class ThoughtBudget:
    """The budgets of one model's requests."""

    def __init__(self, vocabulary: Vocabulary, efforts: EffortsConfig = _EFFORTS) -> None:
        self._vocabulary = vocabulary
        # Shares of what may be thought, by effort; none where the template tells the model itself.
        self._shares = {} if vocabulary.takes_effort else msgspec.structs.asdict(efforts)

    @cached_property
    def tags(self) -> ThinkingTags | None:
        """Around a thought that no prompt has begun; None where it cannot be closed by tokens."""
        return thinking_tags(self._vocabulary)

    def tags_of(self, prepared: Prepared) -> ThinkingTags | None:
        """The same where the prompt has left the thought."""
        if self.tags is None or not is_opened(prepared, self._vocabulary):
            return self.tags
        return dataclasses.replace(self.tags, opened=True)

    def check(self, request: GenerationRequest) -> None:
        """Raises UNSUPPORTED_FIELD for a budget where nothing is thought or it cannot be kept, and
        INVALID_ARGUMENT for one that no thought can be closed in, and for an effort of which nobody knows how
        much it is.
        """
        effort = _effort(request)
        if effort is not None and self._shares and effort not in EFFORTS and self._thinks(request):
            problem = f"{str(effort)[:80]!r} is not one of {', '.join(EFFORTS)}"
            raise refuse(request, f"template_options.{EFFORT}", problem)
        budget = request.sampling.max_thinking_tokens
        if budget is None:
            return
        problem = ""
        if not isinstance(request.prompt, Conversation):
            problem = "thoughts are told apart in conversations alone"
        elif not self._vocabulary.reasoning_format:
            problem = f"model {request.model!r} does not reason"
        if problem:
            raise unsupported(request.field(_FIELD), "leave it out", problem)
        least = self._closing(request).least
        if budget < least:
            raise refuse(
                request,
                _FIELD,
                f"{budget} is less than the {least} tokens that end a thought; ask for at least {least}",
            )

    def held(
        self, request: GenerationRequest, prepared: Prepared, sampling: SamplingParams, most: int | None
    ) -> tuple[SamplingParams, ThinkingTags | None]:
        """The options with the budget that holds, and the tags around the thought; None where nothing is
        thought, or as much as the model likes. `most` is the tier's bound. A budget that was asked for leaves
        room for the answer; an effort is a budget where none was asked for. Raises what `check` does, and
        INVALID_ARGUMENT for allowed_token_ids that a thought could not end with.
        """
        asked = sampling.max_thinking_tokens
        share = self._share(request) if asked is None else None
        if not self._thinks(request) or (asked is None and most is None and share is None):
            return replace(sampling, max_thinking_tokens=None), None
        tags = dataclasses.replace(self._closing(request), opened=is_opened(prepared, self._vocabulary))
        if allowed := sampling.allowed_token_ids:
            if not tags.opened and tags.open_id not in allowed:
                return replace(sampling, max_thinking_tokens=None), None
            needed = {tags.close_id, *tags.line_breaks[:1], *tags.blank_line, *tags.answer}
            if missing := sorted(needed.difference(allowed)):
                problem = f"a thought could not end without {', '.join(map(str, missing))}; add them"
                raise refuse(request, "allowed_token_ids", problem)
        bounds = [each for each in (asked, most) if each is not None]
        if asked is not None or share is not None:
            bounds.append(sampling.max_tokens - min(sampling.max_tokens // 4, ANSWER_ROOM))
        budget = int(min(bounds) * (1 if share is None else share))
        return replace(sampling, max_thinking_tokens=max(budget, tags.least)), tags

    def _thinks(self, request: GenerationRequest) -> bool:
        return isinstance(request.prompt, Conversation) and bool(self._vocabulary.reasoning_format)

    def _share(self, request: GenerationRequest) -> float | None:
        """The share of the request's effort; None where it has none, or thoughts cannot be closed."""
        effort = _effort(request)
        return self._shares.get(effort) if isinstance(effort, str) and self.tags is not None else None

    def _closing(self, request: GenerationRequest) -> ThinkingTags:
        if self.tags is None:
            problem = (
                f"model {request.model!r} has no tokens of its own for {form_of(self._vocabulary).close}"
            )
            raise unsupported(request.field(_FIELD), "take another model or tier, or leave it out", problem)
        return self.tags
