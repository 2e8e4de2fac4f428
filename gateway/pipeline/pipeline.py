"""From a request to attempts: who may ask for what, which model answers, what is refused; whichever face it
came by.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TypeAlias

from msgspec.structs import replace
from opentelemetry.trace import Span, SpanKind

from contract.chat import Conversation, TextPrompt, TokenPrompt
from contract.errors import MillraceError, Reason, invalid
from contract.prefix import narrowed
from contract.retention import FULL
from contract.sampling import outside
from gateway.intake.intake import Intake
from gateway.limits.limiter import TokenLimiter
from gateway.models.catalog import Catalog, ServedModel, Target
from gateway.models.loads import ModelLoads, Tell
from gateway.pipeline.attempt import Attempt
from gateway.pipeline.attempts import Attempts
from gateway.pipeline.books import Books
from gateway.pipeline.call import Call
from gateway.pipeline.delta import ChoiceDelta, Usage
from gateway.pipeline.pooled import check_task
from gateway.pipeline.retention import retained
from gateway.pipeline.shadow import Shadows
from gateway.pipeline.validate import (
    check_answers,
    check_cut,
    check_streams,
    prompt_limit,
    token_limit,
    uncut,
    validate,
)
from gateway.settings import ANY_MODEL
from gateway.text.detokenizer import detokenizer
from gateway.tiers import Tier, Tiers
from gateway.types.request import Caller, Encoded, GenerationRequest
from observability.emit import names
from observability.emit.tracing import Telemetry
from runtime.deferred import Deferred

# A cheaper model for what a model would refuse for its load, where the tier names one and the request
# allows it: attempts in a row, of which the first that an engine works on answers.

_OVERLOAD = frozenset({Reason.QUEUE_LIMIT_EXCEEDED, Reason.ENGINE_UNAVAILABLE, Reason.DRAINING})


def is_overload(error: MillraceError) -> bool:
    """Whether another model may accept what this one refuses for its load."""
    # A field at fault is one everywhere.
    return error.reason in _OVERLOAD and not error.field


async def in_a_row(open_first: Open, open_other: Open) -> tuple[Attempt, MillraceError | None]:
    """The attempt that answers, and what the first one was refused with where it is the other.

    Where both are refused, the client gets the first one's refusal: by what is raised, or by the attempt that
    is returned. An attempt that is not returned is closed.
    """
    first, refusal = await _tried(open_first)
    if refusal is None:
        assert first is not None, "an attempt is open, or was refused"
        return first, None
    if not is_overload(refusal):
        return _as_refused(first, refusal), None
    if first is not None:
        await first.let_go()
    try:
        other, again = await _tried(open_other, waits=first is not None)
    except BaseException as error:
        if first is not None and first.call.is_closed:
            # The other one was open, and is in the books.
            first.supersede()
        elif first is not None:
            await first.close(error)
        raise
    if other is None or again is not None:
        if other is not None:
            other.supersede()
            await other.let_go()
        return _as_refused(first, refusal), None
    if first is not None:
        first.supersede()
    return other, refusal


# Opens an attempt, or raises why there is none.
Open: TypeAlias = Callable[[], Awaitable[Attempt]]


async def _tried(open_attempt: Open, *, waits: bool = True) -> tuple[Attempt | None, MillraceError | None]:
    """An attempt, and why no engine works on it; it is waited for that only where it `waits`."""
    try:
        attempt = await open_attempt()
    except MillraceError as error:
        return None, error
    try:
        return attempt, await attempt.refusal() if waits else None
    except BaseException as error:
        await attempt.close(error)
        raise


def _as_refused(attempt: Attempt | None, refusal: MillraceError) -> Attempt:
    if attempt is None:
        raise refusal
    return attempt


def cheaper(catalog: Catalog, call: Call, target: Target) -> Target | None:
    """The model that answers instead; None where there is none, or the caller may not use it."""
    request, names = call.request, call.tier.config.fallback
    if not names or not request.allow_fallback or target.adapter:
        return None
    name = names.get(target.served.name) or names.get(ANY_MODEL)
    if name is None or name in target.served.config.names:
        return None
    try:
        found = catalog.resolve(call.caller.identity, name, tier=call.tier.name)
    except MillraceError:
        return None
    is_alike = found.served.vocabulary.fingerprint == target.served.vocabulary.fingerprint
    return found if is_alike or not has_ids(request) else None


def has_ids(request: GenerationRequest) -> bool:
    """Whether it says ids of tokens, which mean others in another vocabulary."""
    sampling = request.sampling
    given = (sampling.logit_bias, sampling.allowed_token_ids, sampling.stop_token_ids)
    return isinstance(request.prompt, TokenPrompt) or any(given)


def _salted(caller: Caller, request: GenerationRequest) -> Caller:
    """The caller under the salt of the request, within the tenant's."""
    if request.cache_salt is None:
        return caller
    salt = narrowed(caller.identity.cache_salt, request.cache_salt)
    return replace(caller, identity=replace(caller.identity, cache_salt=salt))


class Answer:
    """One or several attempts in the order in which they were asked for, begun together or not at all. Use as
    an async context manager: leaving it settles them all, whatever happened.
    """

    def __init__(self, attempts: Sequence[Attempt]) -> None:
        self.attempts = attempts

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(error)

    async def close(self, error: BaseException | None = None) -> None:
        """Settles every attempt, with `error` as what ended it; once, however often it is called."""
        for attempt in reversed(self.attempts):
            await attempt.close(error)

    def cancel(self) -> None:
        """Ends every attempt because its client went away."""
        for attempt in self.attempts:
            attempt.cancel()

    def usages(self) -> list[Usage]:
        """Of each attempt so far; final once `deltas` has ended."""
        return [attempt.usage() for attempt in self.attempts]

    async def deltas(self) -> AsyncIterator[tuple[int, list[ChoiceDelta]]]:
        """(index of the attempt, its deltas) as they come; ends when all attempts have ended.

        Raises the MillraceError that ended one of them.
        """
        if len(self.attempts) == 1:
            while deltas := await self.attempts[0].drain():
                yield 0, deltas
            return
        running = {asyncio.ensure_future(each.drain()): index for index, each in enumerate(self.attempts)}
        try:
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = running.pop(task)
                    if deltas := task.result():
                        yield index, deltas
                        running[asyncio.ensure_future(self.attempts[index].drain())] = index
        finally:
            for task in running:
                task.cancel()


# Token ids that become text at once, in less than a millisecond.
_DECODED_AT_ONCE = 4096


class Pipeline:
    """Turns requests into attempts, and attempts into answers."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        attempts: Attempts,
        tiers: Tiers,
        books: Books,
        loads: ModelLoads,
        shadows: Shadows,
        telemetry: Telemetry,
        deferred: Deferred,
    ) -> None:
        self.loads = loads
        self.catalog = catalog
        self.attempts = attempts
        self.books = books
        self.intake: Intake = attempts.intake
        self.limiter: TokenLimiter = attempts.limiter
        self.callers = attempts.callers
        # Who asks for what is not with an engine yet, each under a key of its own.
        self.arriving: dict[object, Caller] = {}
        # When the last request came that is no line of a batch.
        self.asked_s: float | None = None
        # Refuses what is new; what runs goes on.
        self.draining = False
        # Runs what records requests after their answers have left.
        self._deferred = deferred
        self.tiers = tiers
        self._shadows = shadows
        self._telemetry = telemetry

    @property
    def num_open(self) -> int:
        """Accepted requests that have not ended."""
        return len(self.books.running)

    def end_all(self, error: MillraceError) -> None:
        """Ends what still runs with `error`, which each client gets."""
        for attempt in list(self.books.running):
            attempt.end(error)

    def model(self, caller: Caller, name: str | None) -> ServedModel:
        """The model for what generates nothing; without a name any that the caller may use. Raises
        MODEL_NOT_FOUND or MODEL_NOT_ALLOWED.
        """
        if name is None:
            name = next(iter(self.catalog.names(caller.identity)), next(iter(self.catalog.served), ""))
        self.catalog.check(caller.identity, name)
        found = self.catalog.any_of(name)
        if found is None:
            raise self.attempts.fleet.unavailable()
        return found

    def reasons(self, name: str) -> bool:
        """Whether what is asked for under a name reasons before it answers."""
        found = self.catalog.any_of(name)
        return found is not None and bool(found.vocabulary.reasoning_format)

    def defaults(self, served: ServedModel | None) -> list[tuple[str, int | float, str]]:
        """Sampling options of requests to a model that say nothing of them: (option, value, who says it)."""
        if served is None:
            return []
        reader = self.attempts.reader(served)
        return [(name, value, reader.default_sources[name]) for name, value in reader.defaults.items()]

    def max_model_len(self, served: ServedModel) -> int:
        """See `Attempts.max_model_len`."""
        return self.attempts.max_model_len(served)

    async def encode(self, caller: Caller, served: ServedModel, request: GenerationRequest) -> Encoded:
        """A model's token ids of a request's prompt, which nothing is generated for."""
        prompt = request.prompt
        assert isinstance(prompt, Conversation | TextPrompt), "what is encoded already needs no encoding"
        tier = self.tiers.resolve(caller.identity, request.service_tier)
        if isinstance(prompt, Conversation):
            check_task(request, served)
        check_cut(request)
        limit = token_limit(self.max_model_len(served), tier.config.max_context_tokens)
        room = 0 if request.truncate_prompt_tokens is None else prompt_limit(request, limit)
        try:
            return await self.attempts.tokenizer.tokenize(
                served.key,
                prompt,
                truncated_to=room,
                context=self.callers.sign(caller, tier, ("", ""), served.key),
            )
        except MillraceError as error:
            raise request.tell(uncut(request, error, limit, room)) from error

    async def decode(self, caller: Caller, served: ServedModel, token_ids: Sequence[int], field: str) -> str:
        """Text of token ids; raises INVALID_ARGUMENT below `field` for one that the model does not have."""
        size = served.vocabulary.size
        decoder, pieces = detokenizer(self.attempts.reader(served).texts), []
        async with self.intake.exclusive(caller.identity.tenant) as slices:
            for start in range(0, len(token_ids), _DECODED_AT_ONCE):
                some = token_ids[start : start + _DECODED_AT_ONCE]
                for index, token_id in enumerate(some):
                    if not 0 <= token_id < size:
                        raise invalid(f"{field}[{start + index}]", outside(token_id, size))
                pieces.append(decoder.feed(some))
                await slices.breathe()
        return "".join([*pieces, decoder.finish()])

    async def answer(
        self, caller: Caller, requests: Sequence[GenerationRequest], tell: Tell | None = None
    ) -> Answer:
        """All requests accepted, or none. The result must be used as a context manager. `tell` hears how far
        a model is that is loaded for them.
        """
        attempts: list[Attempt] = []
        try:
            for request in requests:
                attempt = await self.begin(caller, request, tell)
                attempts.append(attempt)
        except BaseException as error:
            await Answer(attempts).close(error)
            raise
        return Answer(attempts)

    async def begin(self, caller: Caller, request: GenerationRequest, tell: Tell | None = None) -> Attempt:
        """Accepts or refuses one request. The result must be used as a context manager, which settles it."""
        span = self._telemetry.start(
            names.GATEWAY_REQUEST, parent=caller.trace, kind=SpanKind.SERVER, start_s=caller.received_s
        )
        tier_name, arrival = caller.identity.tier, object()
        call = target = None
        self.arriving[arrival] = caller
        if not caller.identity.in_batch:
            self.asked_s = caller.received_s
        try:
            tier, request = self._checked(caller, request)
            tier_name = tier.name
            target = self.catalog.resolve(
                caller.identity, request.model, tier=tier.name, cache_key=request.prompt_cache_key
            )
            call = Call(_salted(caller, request), request, tier, span, self._telemetry)
            async with self.loads.using(target.served, tell):
                attempt = await self._attempt(call, target)
        except BaseException as error:
            self._refused(span, caller, request, tier_name, call, target, error)
            # A name for any other would keep it, with all of the request, until the collector comes by.
            if not isinstance(error, MillraceError):
                raise
            shown = request.tell(error)
            if shown is error:
                raise
            raise shown from error
        finally:
            del self.arriving[arrival]
        # Not with the answer's end: what is expected of a queue would overwrite what was expected later.
        self._deferred.call(call.record)
        return attempt

    def _checked(self, caller: Caller, request: GenerationRequest) -> tuple[Tier, GenerationRequest]:
        """The tier under which the request may be served, and what it has of it; raises why it is not."""
        if self.draining:
            raise MillraceError(
                Reason.DRAINING, "this gateway is shutting down; send the request again", retry_after_s=1.0
            )
        validate(request, self.intake.limits)
        self.catalog.check(caller.identity, request.model)
        tier = self.tiers.resolve(caller.identity, request.service_tier)
        if request.retention is not None or tier.config.kv.policy != FULL:
            request = retained(request, tier)
        if request.test_time is not None and self.attempts.deliberates is not None:
            request = self.attempts.deliberates.admitted(request, tier)
            check_answers(request, request.num_prompts, self.intake.limits)
        if request.num_streams > 1 and (most := self.limiter.stream_limit(caller.identity, tier)):
            check_streams(request, *most)
        return tier, request

    def _refused(
        self,
        span: Span,
        caller: Caller,
        request: GenerationRequest,
        tier: str,
        call: Call | None,
        target: Target | None,
        error: BaseException,
    ) -> None:
        if call is not None:
            self._deferred.call(call.record)
        if call is None or not call.is_closed:
            # A name that is not served is a client's own word. Of an alias the model counts that it led to.
            known = request.model if self.catalog.knows(request.model) else ""
            model = known if target is None else target.told
            refused = partial(self.books.refused, span, caller, request, tier)
            self._deferred.call(refused, model, error, time.monotonic())

    async def _attempt(self, call: Call, target: Target) -> Attempt:
        """An attempt; where a cheaper model may answer instead, two of them in a row."""
        open_first = partial(self.attempts.open, call, target, self.books)
        other = cheaper(self.catalog, call, target)
        if other is None:
            attempt = await open_first()
        else:
            open_other = partial(self.attempts.open, call, other, self.books, fallback_from=target.told)
            attempt, refusal = await in_a_row(open_first, open_other)
            if refusal is not None:
                self.books.fell_back(attempt, refusal)
        if self.catalog.models.shadows and self._shadows.wants(attempt):
            attempt.kept_ids = []
        return attempt
