"""How much may be thought for a request: what it asks for, within its tier's bound and the model's means."""

from __future__ import annotations

import dataclasses
from functools import cached_property

from msgspec.structs import replace

from contract.chat import Conversation
from contract.errors import unsupported
from contract.sampling import SamplingParams
from contract.thinking import ThinkingTags
from gateway.pipeline.validate import refuse
from gateway.text.detokenizer import Vocabulary
from gateway.text.thinking import form_of, thinking_tags
from gateway.types.request import GenerationRequest, Prepared

# Tokens of an answer that no budget which was asked for takes: so many, or a quarter of max_tokens.
ANSWER_ROOM = 1024
_FIELD = "max_thinking_tokens"


def is_opened(prepared: Prepared, vocabulary: Vocabulary) -> bool:
    """Whether the template has begun a thought in the prompt."""
    prefix, form = prepared.assistant_prefix, form_of(vocabulary)
    return prefix.rfind(form.open) > prefix.rfind(form.close)


class ThoughtBudget:
    """The budgets of one model's requests."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

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
        INVALID_ARGUMENT for one that no thought can be closed in.
        """
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
        room for the answer. Raises what `check` does, and INVALID_ARGUMENT for allowed_token_ids that a
        thought could not end with.
        """
        asked = sampling.max_thinking_tokens
        thinks = isinstance(request.prompt, Conversation) and self._vocabulary.reasoning_format
        if not thinks or (asked is None and most is None):
            return replace(sampling, max_thinking_tokens=None), None
        tags = dataclasses.replace(self._closing(request), opened=is_opened(prepared, self._vocabulary))
        if allowed := sampling.allowed_token_ids:
            if not tags.opened and tags.open_id not in allowed:
                return replace(sampling, max_thinking_tokens=None), None
            needed = {tags.close_id, *tags.line_breaks[:1], *tags.blank_line, *tags.answer}
            if missing := sorted(needed.difference(allowed)):
                problem = f"a thought could not end without {', '.join(map(str, missing))}; add them"
                raise refuse(request, "allowed_token_ids", problem)
        budget = min(each for each in (asked, most) if each is not None)
        if asked is not None:
            budget = min(budget, sampling.max_tokens - min(sampling.max_tokens // 4, ANSWER_ROOM))
        return replace(sampling, max_thinking_tokens=max(budget, tags.least)), tags

    def _closing(self, request: GenerationRequest) -> ThinkingTags:
        if self.tags is None:
            problem = (
                f"model {request.model!r} has no tokens of its own for {form_of(self._vocabulary).close}"
            )
            raise unsupported(request.field(_FIELD), "take another model or tier, or leave it out", problem)
        return self.tags
