"""How a request's answers are read: which output parsers apply, and which special tokens they must see."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from contract.chat import Conversation
from gateway.models.catalog import ServedModel
from gateway.pipeline.choice import ChoiceStream
from gateway.pipeline.defaults import checkpoint_defaults
from gateway.pipeline.validate import refuse
from gateway.text.choice import TextOptions, shown_ids
from gateway.text.detokenizer import TokenTexts
from gateway.text.tool_calls import PARSERS
from gateway.text.tool_calls.parser import CallIds
from gateway.types.prepared import Prepared
from gateway.types.request import GenerationRequest


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

    def choices(
        self, request: GenerationRequest, prepared: Prepared, request_id: str, num_choices: int
    ) -> dict[int, ChoiceStream]:
        """One reader per choice, by its index."""
        options = self._options(request, prepared)
        texts = self._texts(options)
        with_logprobs = request.sampling.logprobs is not None
        return {
            index: ChoiceStream(
                index, texts, options, self._call_ids(request_id, index), with_logprobs=with_logprobs
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
