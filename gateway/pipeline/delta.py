"""From an engine's outputs to what the faces write: deltas of choices, usage, and what is known before."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import repeat
from typing import Any, NamedTuple

import msgspec

from contract.chat import Conversation, LeftOut, TextPrompt
from contract.formats import UNKNOWN_FORMAT
from contract.grammar import EnforcementReport, Verdict
from contract.outputs import ChoiceStatistics, FinishReason, FirstToken, TokenLogprobs
from gateway.config import EffortsConfig
from gateway.engines.types import Chosen, EngineOutput
from gateway.models.catalog import ServedModel
from gateway.pipeline.thinking import ThoughtBudget, is_opened
from gateway.pipeline.validate import checkpoint_defaults, refuse
from gateway.text.choice import ChoiceText, TextOptions, shown_ids
from gateway.text.delta import TextDelta
from gateway.text.detokenizer import Detokenizer, TokenTexts, detokenizer
from gateway.text.tool_calls import PARSERS
from gateway.text.tool_calls.parser import CallIds
from gateway.types.deliberation import Deliberated
from gateway.types.request import GenerationRequest, Prepared


class ChoiceDelta(TextDelta, kw_only=True):
    """What one output adds to one choice."""

    index: int = 0
    token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprobs] = msgspec.field(default_factory=list)
    # On the first delta of a request that asked for them.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # On the last delta of the choice.
    finish_reason: FinishReason | None = None
    # Stop string that ended the choice.
    stop_reason: str | None = None
    # On the last delta of a complete answer whose schema was not enforced wholly.
    verdict: Verdict | None = None

    def absorb(self, later: ChoiceDelta) -> None:
        """Adds what came right after this delta of the same choice, which stays as it is."""
        self.absorb_text(later)
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.verdict = later.verdict


def by_choice(deltas: Iterable[ChoiceDelta]) -> list[ChoiceDelta]:
    """One delta per choice, for faces whose messages say once what they add to an answer."""
    found: dict[int, ChoiceDelta] = {}
    for delta in deltas:
        earlier = found.setdefault(delta.index, delta)
        if earlier is not delta:
            earlier.absorb(delta)
    return list(found.values())


class TimeToFirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """Named parts in seconds; `total_s` is their sum."""

    total_s: float
    queue_s: float
    preprocess_s: float
    prefill_s: float
    first_decode_s: float
    # Until one of several samples was chosen as the answer, from the first one's first token on.
    deliberation_s: float
    serialize_s: float
    network_s: float


class SharedTime(NamedTuple):
    """How long the engine worked on another request of the tenant's while this one was held back."""

    request_id: str
    cause: str
    overlap_s: float


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request."""

    prompt_tokens: int
    # Tokens of the answers that are returned; then of candidates and beams, which are not.
    completion_tokens: int
    candidate_tokens: int = 0
    cached_prompt_tokens: int = 0
    reasoning_tokens: int = 0
    # None when no token was made.
    ttft: TimeToFirstToken | None = None
    # Of all choices together, after the first; of a chosen sample, as it was generated. None with fewer than
    # two.
    tokens_per_s: float | None = None
    # Of the tokens that speculation or a grammar proposed, those that were kept.
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    # Named cause to seconds lost, of all choices together.
    delayed_by_s: Mapping[str, float] = {}
    # Which of the tenant's own requests had to do with that.
    shared_with: tuple[SharedTime, ...] = ()
    # Share of attention that the answers lost at most by what they forgot; None where that was not measured.
    kv_lost: float | None = None
    # What was spent on which sample, where `test_time` was asked for.
    deliberated: Deliberated | None = None

    @property
    def billed_tokens(self) -> int:
        """Tokens that were generated and are paid for, whether they are returned or not."""
        return self.completion_tokens + self.candidate_tokens


class Echo(NamedTuple):
    """The prompt as every choice begins with it."""

    # Without the beginning of a character that its last tokens may have.
    text: str
    # Has read the prompt's tokens. Copies of it read the answer's, which may complete that character.
    reader: Detokenizer
    # Token id that the prompt begins with; -1 where a text has become no token.
    first_id: int


class AnswerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an answer before its first token."""

    request_id: str
    model: str
    # Version of it; "" where none is told apart.
    revision: str = ""
    # LoRA adapter that answers; "" for the base model.
    adapter: str = ""
    created_unix_s: int
    # Tier that the request is really served under.
    service_tier: str
    num_prompt_tokens: int
    num_choices: int
    # What the model has not seen of a prompt that was too long.
    left_out: LeftOut | None = None
    enforcement: EnforcementReport | None = None
    # Where it was asked for.
    echo: Echo | None = None


def first_computed_s(first: FirstToken, submitted_s: float, heard_s: float) -> float:
    """When an engine had the first token of what was submitted to it, in monotonic seconds. A gateway that
    has no processor for a while hears of it later, and of many tokens at once.
    """
    return min(heard_s, submitted_s + first.queue_s + first.prefill_s + first.first_decode_s)


class Meter:
    """Counts tokens and time along the life of one request, and sums what its engines report. Moments are
    monotonic seconds.

    `observe_gap` is called with the time between every two outputs that have tokens.
    """

    def __init__(
        self, received_s: float, observe_gap: Callable[[float], None], submitted_s: float | None = None
    ) -> None:
        self.received_s = received_s
        self._observe_gap = observe_gap
        # When it was handed to an engine.
        self.submitted_s = submitted_s
        # When the first output came, and when its chunk was written.
        self.first_output_s: float | None = None
        self.first_written_s: float | None = None
        self.last_output_s = received_s
        self.first_token = FirstToken()
        # An engine has computed something.
        self.has_worked = False
        self.completion_tokens = 0
        self.longest_gap_s = 0.0
        self.statistics = ChoiceStatistics()
        # Tokens computed so far of answers that are chosen at the end, until they are sent.
        self.withheld_tokens = 0
        # Of an answer that is one of several samples.
        self.chosen: Chosen | None = None

    def count(self, output: EngineOutput, now_s: float) -> None:
        """Takes the numbers of one output."""
        self.withheld_tokens = output.withheld_tokens
        if output.withheld_tokens:
            return
        if self.first_output_s is None:
            self.first_output_s, self.chosen = now_s, output.chosen
            if output.first_token is not None:
                self.first_token = output.first_token
        elif output.token_ids and self.chosen is None:
            gap_s = now_s - self.last_output_s
            self._observe_gap(gap_s)
            self.longest_gap_s = max(self.longest_gap_s, gap_s)
        self.last_output_s = now_s
        self.completion_tokens += len(output.token_ids)
        if output.statistics is not None:
            self.statistics.add(output.statistics)
            self.has_worked |= output.statistics.num_steps > 0
        self.has_worked |= bool(output.token_ids)

    @property
    def engine_ttft_s(self) -> float | None:
        """From the submission to the first output."""
        if self.first_output_s is None or self.submitted_s is None:
            return None
        return self.first_output_s - self.submitted_s

    def ttft(self) -> TimeToFirstToken | None:
        """The parts of the time to the first token, once there is one.

        Network is what the named parts leave over: the way to the engine and back. What comes after the first
        token of the first sample, where an answer is chosen among several, is deliberation.
        """
        if self.first_output_s is None or self.submitted_s is None:
            return None
        written_s = self.first_written_s or time.monotonic()
        preprocess_s = self.submitted_s - self.received_s
        serialize_s = written_s - self.first_output_s
        first = self.first_token
        engine_s = first.queue_s + first.prefill_s + first.first_decode_s
        came_s = self.first_output_s if self.chosen is None else self.chosen.since_s
        network_s = max(0.0, came_s - self.submitted_s - engine_s)
        deliberation_s = self.first_output_s - came_s
        return TimeToFirstToken(
            # The sum of the parts, by definition; equals written - received up to the clocks' ticks.
            total_s=preprocess_s + engine_s + network_s + deliberation_s + serialize_s,
            queue_s=first.queue_s,
            preprocess_s=preprocess_s,
            prefill_s=first.prefill_s,
            first_decode_s=first.first_decode_s,
            deliberation_s=deliberation_s,
            serialize_s=serialize_s,
            network_s=network_s,
        )

    def tpot_s(self, num_choices: int) -> float | None:
        """Mean time per output token of a choice after its first; None with fewer than two. Of an answer that
        was chosen, it is that of the sample, because its own tokens come at once.
        """
        if self.first_output_s is None or self.completion_tokens <= num_choices:
            return None
        if self.chosen is not None:
            return self.chosen.tpot_s
        steps = self.completion_tokens / num_choices - 1
        return (self.last_output_s - self.first_output_s) / steps

    @property
    def tokens_per_s(self) -> float | None:
        """Of all choices together after the first token; of a chosen answer, whoever generated it."""
        if self.chosen is not None:
            return 1 / self.chosen.tpot_s if self.chosen.tpot_s else None
        if self.first_output_s is None or self.submitted_s is None or self.completion_tokens < 2:
            return None
        seconds = self.last_output_s - first_computed_s(
            self.first_token, self.submitted_s, self.first_output_s
        )
        return (self.completion_tokens - 1) / seconds if seconds > 0 else None


# One choice of a request: from the engine's outputs to deltas.


# Reasons for which an answer is not whole.
_CUT = (FinishReason.LENGTH, FinishReason.BUDGET)


class ReadOutput(EngineOutput, kw_only=True):
    """A piece of an answer that another attempt has read, counted and paid for; it has no tokens."""

    delta: ChoiceDelta


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
        # Ids of outputs of which nothing could be sent yet.
        self._held_ids: list[int] = []

    def feed(self, output: EngineOutput) -> ChoiceDelta | None:
        """The delta of an output, None when nothing is certain yet. It has a finish reason when the choice
        ended. Ids behind a stop string are taken out of the output.
        """
        delta = ChoiceDelta(index=self.index, token_ids=output.token_ids)
        text = self.text
        if self._with_logprobs or text.watches_ids or (len(output.token_ids) > 1 and text.may_end):
            self._feed_one_by_one(output, delta)
        else:
            self.text.feed(output.token_ids, delta)
        if self.text.ended:
            self._end(delta, FinishReason.STOP)
        elif output.finish_reason is not None:
            self._end(delta, output.finish_reason)
        elif not (delta.parts or delta.logprobs):
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

    def _feed_one_by_one(self, output: EngineOutput, delta: ChoiceDelta) -> None:
        """The text may end at any token, and each has its log-probability."""
        logprobs = output.logprobs if self._with_logprobs else repeat(None)
        for number, (token_id, logprob) in enumerate(zip(output.token_ids, logprobs, strict=False), start=1):
            if self.text.ends_at(token_id):
                del output.token_ids[number - 1 :]
                break
            if logprob is not None:
                self._logprobs.append((self.text.num_decoded, logprob))
            self.text.feed((token_id,), delta)
            if self.text.ended:
                del output.token_ids[number:]
                break
        self._release_logprobs(delta)

    def _release_logprobs(self, delta: ChoiceDelta) -> None:
        text = self.text
        all_passed = text.num_passed == text.num_decoded
        while self._logprobs and (all_passed or self._logprobs[0][0] < text.num_passed):
            delta.logprobs.append(self._logprobs.popleft()[1])

    def _end(self, delta: ChoiceDelta, reason: FinishReason) -> None:
        text = self.text
        text.finish(delta, is_cut=reason in _CUT)
        self._release_logprobs(delta)
        delta.stop_reason = text.stop_string
        if text.stop_string is not None:
            reason = FinishReason.STOP
        is_cut = text.stop_string is not None and text.in_call
        if reason is FinishReason.STOP and text.called_tools and not is_cut:
            reason = FinishReason.TOOL_CALLS
        delta.finish_reason = reason


# Who recommends sampling options.
_GENERATION_CONFIG = "generation_config.json"
_CONFIGURED = "defaults of the model in the configuration"


class AnswerReader:
    """Makes the choices of a model's requests."""

    def __init__(self, served: ServedModel, efforts: EffortsConfig) -> None:
        vocabulary = served.vocabulary
        self.vocabulary = vocabulary
        self.thoughts = ThoughtBudget(vocabulary, efforts)
        recommended = checkpoint_defaults(vocabulary.generation_config)
        # Sampling options of requests that say nothing of them, and who says it instead.
        self.defaults: Mapping[str, Any] = {**recommended, **served.config.defaults}
        self.default_sources: Mapping[str, str] = {
            **{name: vocabulary.sampling_sources.get(name, _GENERATION_CONFIG) for name in recommended},
            **dict.fromkeys(served.config.defaults, _CONFIGURED),
        }
        is_greedy = not self.defaults.get("temperature", 1.0) and "temperature" not in served.config.defaults
        # Of those, what a request for several answers leaves to the API.
        self._of_one = ("temperature",) if is_greedy else ()
        self._tool_format = vocabulary.tool_call_format if vocabulary.tool_call_format in PARSERS else ""
        # Without any marker shown.
        self.texts = TokenTexts(vocabulary)
        # With the markers that parsers must see, by (tool-call format, reasoning format).
        self._marked: dict[tuple[str, str], TokenTexts] = {}

    def defaults_of(self, request: GenerationRequest) -> Mapping[str, Any]:
        """Those that hold for the request. Files that recommend greedy decoding speak of one answer: several
        would be equal, so that they are drawn as the API says.
        """
        sampling = request.sampling
        asked = (sampling.n, sampling.best_of, sampling.beam_width)
        if not self._of_one or (request.test_time is None and max(each or 1 for each in asked) == 1):
            return self.defaults
        return {name: value for name, value in self.defaults.items() if name not in self._of_one}

    def check(self, request: GenerationRequest) -> None:
        """Raises INVALID_ARGUMENT for tools whose calls nobody could read, and for a budget that no thought
        can be closed in; UNSUPPORTED_FIELD for one where nothing is thought.
        """
        prompt = request.prompt
        self.thoughts.check(request)
        if isinstance(prompt, Conversation) and prompt.calls_tools and not self._tool_format:
            problem = f"model {request.model!r} has no tool-call format that can be read; leave them out"
            if self.vocabulary.tool_call_format == UNKNOWN_FORMAT:
                problem = (
                    f"model {request.model!r} writes tool calls in a format that is not known here; leave "
                    "them out, or have it served with --tool-call-parser"
                )
            raise refuse(request, "tools", problem)

    def echo(self, request: GenerationRequest, prepared: Prepared) -> Echo | None:
        """The prompt, where answers begin with it."""
        if not request.echo:
            return None
        reader = detokenizer(self.texts)
        text = reader.feed(prepared.token_ids)
        if isinstance(request.prompt, TextPrompt) and prepared.left_out is None:
            text = request.prompt.text
        return Echo(text, reader, next(iter(prepared.token_ids), -1))

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
        return TextOptions(
            stop=sampling.stop,
            stop_token_ids=frozenset(sampling.stop_token_ids if self.watches_ids(request) else ()),
            min_tokens=sampling.min_tokens or 0,
            tool_call_format=self._tool_format if prompt.calls_tools else "",
            reasoning_format=self.vocabulary.reasoning_format,
            tools=prompt.tools if prompt.calls_tools else (),
            reasoning_opened=is_opened(prepared, self.vocabulary),
            thinking=self.thoughts.tags_of(prepared),
            single_tool_call=not prompt.parallel_tool_calls,
        )

    def watches_ids(self, request: GenerationRequest) -> bool:
        """Whether ids that end the answer are looked for here and not by the engine, because there may be
        thoughts before it. What ranks its candidates at the end needs to know their ends itself.
        """
        thinks = isinstance(request.prompt, Conversation) and self.vocabulary.reasoning_format
        sampling = request.sampling
        ranks = (sampling.beam_width or 1) > 1 or (sampling.best_of or 1) > (sampling.n or 1)
        return bool(thinks) and not ranks

    def _call_ids(self, request_id: str, choice_index: int) -> CallIds:
        return _CALL_IDS.get(self._tool_format, _long_ids)(request_id, choice_index)

    def _texts(self, options: TextOptions) -> TokenTexts:
        key = (options.tool_call_format, options.reasoning_format)
        texts = self._marked.get(key)
        if texts is None:
            shown = shown_ids(self.texts, options)
            texts = TokenTexts(self.vocabulary, shown_ids=shown) if shown else self.texts
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
