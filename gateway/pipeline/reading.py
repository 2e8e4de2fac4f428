"""How a request's answers are read: which output parsers apply, and which special tokens they must see."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping

from contract.chat import Conversation, TextPrompt
from contract.outputs import FinishReason, TokenLogprobs
from gateway.engines.types import EngineOutput
from gateway.models.catalog import ServedModel
from gateway.pipeline.delta import ChoiceDelta, Echo
from gateway.pipeline.validate import checkpoint_defaults, refuse
from gateway.text.choice import ChoiceText, TextOptions, shown_ids
from gateway.text.detokenizer import Detokenizer, TokenTexts, detokenizer
from gateway.text.tool_calls import PARSERS
from gateway.text.tool_calls.parser import CallIds
from gateway.types.request import GenerationRequest, Prepared

# One choice of a request: from the engine's outputs to deltas.


class ChoiceStream:
    """Feeds outputs through the text stages and keeps log-probabilities beside their text."""

    __slots__ = ("_held_ids", "_logprobs", "_with_logprobs", "index", "text")

    def __init__(
        self,
        index: int,
        texts: TokenTexts,
        options: TextOptions,
        call_id: CallIds,
        *,
        with_logprobs: bool,
        after: Detokenizer | None = None,
    ) -> None:
        self.index = index
        self.text = ChoiceText(texts, options, call_id, after)
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


class AnswerReader:
    """Makes the choices of a model's requests."""

    def __init__(self, served: ServedModel) -> None:
        vocabulary = served.vocabulary
        self.vocabulary = self._vocabulary = vocabulary
        # What its checkpoint recommends.
        self.checkpoint = checkpoint_defaults(vocabulary.generation_config)
        self._tool_format = vocabulary.tool_call_format if vocabulary.tool_call_format in PARSERS else ""
        # Without any marker shown.
        self.texts = TokenTexts(vocabulary)
        # With the markers that parsers must see, by (tool-call format, reasoning format).
        self._marked: dict[tuple[str, str], TokenTexts] = {}

    def check(self, request: GenerationRequest) -> None:
        """Raises INVALID_ARGUMENT for tools whose calls nobody could read."""
        prompt = request.prompt
        if isinstance(prompt, Conversation) and prompt.calls_tools and not self._tool_format:
            raise refuse(
                request,
                "tools",
                f"model {request.model!r} has no tool-call format that can be read; leave them out",
            )

    def echo(self, request: GenerationRequest, prepared: Prepared) -> Echo | None:
        """The prompt, where answers begin with it."""
        if not request.echo:
            return None
        reader = detokenizer(self.texts)
        text = reader.feed(prepared.token_ids)
        return Echo(request.prompt.text if isinstance(request.prompt, TextPrompt) else text, reader)

    def choices(
        self,
        request: GenerationRequest,
        prepared: Prepared,
        request_id: str,
        num_choices: int,
        echo: Echo | None = None,
    ) -> dict[int, ChoiceStream]:
        """One reader per choice, by its index; with an echo the text goes on from the prompt's."""
        options = self._options(request, prepared)
        texts = self._texts(options)
        with_logprobs = request.sampling.logprobs is not None
        return {
            index: ChoiceStream(
                index,
                texts,
                options,
                self._call_ids(request_id, index),
                with_logprobs=with_logprobs,
                after=None if echo is None else echo.reader.copy(),
            )
            for index in range(num_choices)
        }

    def _options(self, request: GenerationRequest, prepared: Prepared) -> TextOptions:
        prompt, sampling = request.prompt, request.sampling
        if not isinstance(prompt, Conversation):
            return TextOptions(stop=sampling.stop, min_tokens=sampling.min_tokens or 0)
        prefix = prepared.assistant_prefix
        return TextOptions(
            stop=sampling.stop,
            min_tokens=sampling.min_tokens or 0,
            tool_call_format=self._tool_format if prompt.calls_tools else "",
            reasoning_format=self._vocabulary.reasoning_format,
            reasoning_opened=prefix.rfind("<think>") > prefix.rfind("</think>"),
            single_tool_call=not prompt.parallel_tool_calls,
        )

    def _call_ids(self, request_id: str, choice_index: int) -> CallIds:
        return _CALL_IDS.get(self._tool_format, _long_ids)(request_id, choice_index)

    def _texts(self, options: TextOptions) -> TokenTexts:
        key = (options.tool_call_format, options.reasoning_format)
        texts = self._marked.get(key)
        if texts is None:
            shown = shown_ids(self.texts, options)
            texts = TokenTexts(self._vocabulary, shown_ids=shown) if shown else self.texts
            self._marked[key] = texts
        return texts


def _long_ids(request_id: str, choice_index: int) -> CallIds:
    stem = f"call_{request_id.replace('-', '')[:24]}{choice_index:02d}"
    return lambda call_index: f"{stem}{call_index:02d}"


def _nine_characters(request_id: str, choice_index: int) -> CallIds:
    def call_id(call_index: int) -> str:
        return hashlib.sha256(f"{request_id} {choice_index} {call_index}".encode()).hexdigest()[:9]

    return call_id


# Ids of a choice's tool calls for formats whose templates refuse any others. All are unique, and the same if
# the choice is continued elsewhere.
_CALL_IDS: Mapping[str, Callable[[str, int], CallIds]] = dict.fromkeys(
    ("mistral", "mistral_v11", "mistral_v13"), _nine_characters
)
