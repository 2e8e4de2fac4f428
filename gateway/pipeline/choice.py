"""One choice of a request: from the engine's outputs to deltas."""

from __future__ import annotations

from collections import deque

from contract.outputs import FinishReason, TokenLogprobs
from gateway.engines.types import EngineOutput
from gateway.pipeline.delta import ChoiceDelta
from gateway.text.choice import ChoiceText, TextOptions
from gateway.text.detokenizer import TokenTexts
from gateway.text.tool_calls.parser import CallIds


class ChoiceStream:
    """Feeds outputs through the text stages and keeps log-probabilities beside their text."""

    __slots__ = ("_held_ids", "_logprobs", "_with_logprobs", "index", "text")

    def __init__(
        self, index: int, texts: TokenTexts, options: TextOptions, call_id: CallIds, *, with_logprobs: bool
    ) -> None:
        self.index = index
        self.text = ChoiceText(texts, options, call_id)
        self._with_logprobs = with_logprobs
        # (characters decoded before the token, its log-probability), held back as long as the text is.
        self._logprobs: deque[tuple[int, TokenLogprobs]] = deque()
        # Ids of outputs of which nothing could be told yet.
        self._held_ids: list[int] = []

    def feed(self, output: EngineOutput) -> ChoiceDelta | None:
        """The delta of an output, None when nothing is certain yet. It has a finish reason when the choice
        ended. Ids behind a stop string are taken out of the output.
        """
        delta = ChoiceDelta(index=self.index, token_ids=output.token_ids)
        if self._with_logprobs:
            self._feed_with_logprobs(output, delta)
        elif len(output.token_ids) > 1 and self.text.may_end:
            self._feed_one_by_one(output, delta)
        else:
            self.text.feed(output.token_ids, delta)
        if self.text.ended:
            self._end(delta, FinishReason.STOP)
        elif output.finish_reason is not None:
            self._end(delta, output.finish_reason)
        elif not (delta.content or delta.reasoning or delta.tool_calls or delta.logprobs):
            self._held_ids += output.token_ids
            return None
        if self._held_ids:
            delta.token_ids, self._held_ids = [*self._held_ids, *output.token_ids], []
        return delta

    def end(self, reason: FinishReason) -> ChoiceDelta:
        """The last delta of a choice that the gateway ends."""
        delta = ChoiceDelta(index=self.index, token_ids=self._held_ids)
        self._end(delta, reason)
        return delta

    def _feed_with_logprobs(self, output: EngineOutput, delta: ChoiceDelta) -> None:
        for number, (token_id, logprob) in enumerate(
            zip(output.token_ids, output.logprobs, strict=False), start=1
        ):
            self._logprobs.append((self.text.num_decoded, logprob))
            self.text.feed((token_id,), delta)
            if self.text.ended:
                del output.token_ids[number:]
                break
        self._release_logprobs(delta)

    def _feed_one_by_one(self, output: EngineOutput, delta: ChoiceDelta) -> None:
        for number, token_id in enumerate(output.token_ids, start=1):
            self.text.feed((token_id,), delta)
            if self.text.ended:
                del output.token_ids[number:]
                break

    def _release_logprobs(self, delta: ChoiceDelta) -> None:
        text = self.text
        all_passed = text.num_passed == text.num_decoded
        while self._logprobs and (all_passed or self._logprobs[0][0] < text.num_passed):
            delta.logprobs.append(self._logprobs.popleft()[1])

    def _end(self, delta: ChoiceDelta, reason: FinishReason) -> None:
        text = self.text
        text.finish(delta)
        self._release_logprobs(delta)
        delta.stop_reason = text.stop_string
        if text.stop_string is not None:
            reason = FinishReason.STOP
        is_cut = text.stop_string is not None and text.in_call
        if reason is FinishReason.STOP and text.called_tools and not is_cut:
            reason = FinishReason.TOOL_CALLS
        delta.finish_reason = reason
