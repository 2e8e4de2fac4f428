"""From a request to attempts: who may ask for what, which model answers, what is refused; whichever face it
came by.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from opentelemetry.trace import Span, SpanKind

from contract.chat import TokenPrompt
from contract.errors import MillraceError, Reason, invalid
from contract.sampling import outside
from gateway.limits.limiter import TokenLimiter
from gateway.models.catalog import Catalog, ServedModel, Target
from gateway.pipeline import fallback
from gateway.pipeline.answer import Answer
from gateway.pipeline.attempt import Attempt
from gateway.pipeline.attempts import Attempts
from gateway.pipeline.books import Books
from gateway.pipeline.call import Call
from gateway.pipeline.intake import Intake
from gateway.pipeline.shadow import Shadows
from gateway.pipeline.validate import check_streams, validate
from gateway.text.detokenizer import detokenizer
from gateway.tiers import Tier, Tiers
from gateway.types.caller import Caller
from gateway.types.request import GenerationRequest
from observability.emit import names
from observability.emit.tracing import Telemetry
from runtime.deferred import Deferred

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
        shadows: Shadows,
        telemetry: Telemetry,
        deferred: Deferred,
    ) -> None:
        self.catalog = catalog
        self.attempts = attempts
        self.books = books
        self.intake: Intake = attempts.intake
        self.limiter: TokenLimiter = attempts.limiter
        self.callers = attempts.callers
        # Refuses what is new; what runs goes on.
        self.draining = False
        # What is told of requests.
        self._deferred = deferred
        self._tiers = tiers
        self._shadows = shadows
        self._telemetry = telemetry

    @property
    def num_open(self) -> int:
        """Accepted requests that have not ended."""
        return len(self.books.running)

    def end_all(self, error: MillraceError) -> None:
        """Ends what still runs with `error`, which each client is told."""
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

    def max_model_len(self, served: ServedModel) -> int:
        """Longest prompt plus completion of a model; 0 while no engine is attached."""
        return self.attempts.max_model_len(served)

    async def encode(
        self,
        caller: Caller,
        served: ServedModel,
        request: GenerationRequest,
        special_tokens: bool | None = None,
    ) -> Sequence[int]:
        """A model's token ids of a request's prompt, which nothing is generated for."""
        prompt = request.prompt
        assert not isinstance(prompt, TokenPrompt), "what is encoded already needs no encoding"
        tier = self._tiers.resolve(caller.identity, "")
        try:
            return await self.attempts.tokenizer.tokenize(
                served.key,
                prompt,
                add_special_tokens=special_tokens,
                context=self.callers.sign(caller, tier, ("", ""), served.key),
            )
        except MillraceError as error:
            raise request.tell(error) from error

    async def decode(self, caller: Caller, served: ServedModel, token_ids: Sequence[int], field: str) -> str:
        """Text of token ids; raises INVALID_ARGUMENT below `field` for one that the model does not have."""
        size = served.vocabulary.size
        decoder, pieces = detokenizer(self.attempts.reader(served).texts), []
        async with self.intake.turn(caller.identity.tenant) as slices:
            for start in range(0, len(token_ids), _DECODED_AT_ONCE):
                some = token_ids[start : start + _DECODED_AT_ONCE]
                for index, token_id in enumerate(some):
                    if not 0 <= token_id < size:
                        raise invalid(f"{field}[{start + index}]", outside(token_id, size))
                pieces.append(decoder.feed(some))
                await slices.breathe()
        return "".join([*pieces, decoder.finish()])

    async def answer(self, caller: Caller, requests: Sequence[GenerationRequest]) -> Answer:
        """All requests accepted, or none. The result must be used as a context manager."""
        attempts: list[Attempt] = []
        try:
            for request in requests:
                attempt = await self.begin(caller, request)
                attempts.append(attempt)
        except BaseException as error:
            await Answer(attempts).close(error)
            raise
        return Answer(attempts)

    async def begin(self, caller: Caller, request: GenerationRequest) -> Attempt:
        """Accepts or refuses one request. The result must be used as a context manager, which settles it."""
        span = self._telemetry.start(
            names.GATEWAY_REQUEST, parent=caller.trace, kind=SpanKind.SERVER, start_s=caller.received_s
        )
        tier_name = caller.identity.tier
        call = None
        try:
            tier = self._checked(caller, request)
            tier_name = tier.name
            target = self.catalog.resolve(
                caller.identity, request.model, tier=tier.name, cache_key=request.prompt_cache_key
            )
            call = Call(caller, request, tier, span, self._telemetry)
            attempt = await self._attempt(call, target)
        except BaseException as error:
            self._refused(span, caller, request, tier_name, call, error)
            # A name for any other would keep it, with all of the request, until the collector comes by.
            if not isinstance(error, MillraceError):
                raise
            told = request.tell(error)
            if told is error:
                raise
            raise told from error
        # Not with the answer's end: what is expected of a queue would overwrite what was expected later.
        self._deferred.call(call.tell)
        return attempt

    def _checked(self, caller: Caller, request: GenerationRequest) -> Tier:
        """The tier under which the request may be served; raises why it is not."""
        if self.draining:
            raise MillraceError(
                Reason.DRAINING, "this gateway is shutting down; send the request again", retry_after_s=1.0
            )
        validate(request, self.intake.limits)
        self.catalog.check(caller.identity, request.model)
        tier = self._tiers.resolve(caller.identity, request.service_tier)
        if request.num_streams > 1 and (most := self.limiter.stream_limit(caller.identity, tier)):
            check_streams(request, *most)
        return tier

    def _refused(
        self,
        span: Span,
        caller: Caller,
        request: GenerationRequest,
        tier: str,
        call: Call | None,
        error: BaseException,
    ) -> None:
        if call is not None:
            self._deferred.call(call.tell)
        if call is None or not call.is_closed:
            # A name that is not served is a client's own word.
            model = request.model if self.catalog.knows(request.model) else ""
            refused = partial(self.books.refused, span, caller, request, tier)
            self._deferred.call(refused, model, error, time.monotonic())

    async def _attempt(self, call: Call, target: Target) -> Attempt:
        """An attempt; where a cheaper model may answer instead, two of them in a row."""
        open_first = partial(self.attempts.open, call, target, self.books)
        other = fallback.cheaper(self.catalog, call, target)
        if other is None:
            attempt = await open_first()
        else:
            open_other = partial(self.attempts.open, call, other, self.books, fallback_from=target.told)
            attempt, refusal = await fallback.in_a_row(open_first, open_other)
            if refusal is not None:
                self.books.fell_back(attempt, refusal)
        if self._shadows.wants(attempt):
            attempt.kept_ids = []
        return attempt
