"""prepare → reserve → admit → route → stream → settle: what happens to every request, whichever face it
came by.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from opentelemetry.trace import SpanKind

from contract.chat import JsonSchemaFormat, TokenPrompt
from contract.engines import CancelReason
from contract.errors import MillraceError, Reason, invalid
from contract.sampling import SamplingParams, outside
from gateway.auth.verifier import CallerVerifier
from gateway.engines.continuation import ContinuousStream
from gateway.engines.fleet import Fleet, Route
from gateway.engines.types import Submission
from gateway.limits.limiter import TokenLimiter
from gateway.limits.reservation import Reservation
from gateway.pipeline.admission import expected_wait_s
from gateway.pipeline.call import Call
from gateway.pipeline.defaults import checkpoint_defaults, complete, completion_limit, shortened, token_limit
from gateway.pipeline.delta import AnswerInfo, Usage
from gateway.pipeline.generation import Generation, Outcome
from gateway.pipeline.intake import Intake
from gateway.pipeline.judge import OutputJudge
from gateway.pipeline.metering import Meter
from gateway.pipeline.outcome import Ended, OutcomeRecorder
from gateway.pipeline.reading import AnswerReader
from gateway.pipeline.transcript import Transcript
from gateway.pipeline.validate import check_model_name, check_vocabulary, ranked_tokens, validate
from gateway.text.detokenizer import detokenizer
from gateway.text.vocabulary import Vocabulary
from gateway.tiers import Tier, Tiers
from gateway.tokenizer.client import TokenizerClient
from gateway.types.caller import Caller
from gateway.types.prepared import Prepared
from gateway.types.request import GenerationRequest
from observability.emit import names
from observability.emit.tracing import Telemetry
from services.config import ModelConfig
from services.deferred import Deferred

# Token ids that become text at once, in less than a millisecond.
_DECODED_AT_ONCE = 4096


class Pipeline:
    """Turns requests into generations. Built once the vocabulary is known."""

    def __init__(
        self,
        *,
        model: ModelConfig,
        vocabulary: Vocabulary,
        tokenizer: TokenizerClient,
        fleet: Fleet,
        limiter: TokenLimiter,
        tiers: Tiers,
        callers: CallerVerifier,
        recorder: OutcomeRecorder,
        telemetry: Telemetry,
        deferred: Deferred,
        intake: Intake,
    ) -> None:
        self.model = model
        self.intake = intake
        self.vocabulary = vocabulary
        self.tokenizer = tokenizer
        self.fleet = fleet
        self.limiter = limiter
        self.callers = callers
        self.created_unix_s = int(time.time())
        # Refuses what is new; what runs goes on.
        self.draining = False
        self._open: set[Generation] = set()
        # A tier has so many requests under way.
        self._num_active: dict[str, int] = {}
        # What is told of requests.
        self._deferred = deferred
        self._tiers = tiers
        self._recorder = recorder
        self._metrics = recorder.metrics
        self._telemetry = telemetry
        self._own_names = frozenset((model.served_name, *model.aliases))
        self._checkpoint = checkpoint_defaults(vocabulary.generation_config)
        self._reader = AnswerReader(vocabulary)
        self.texts = self._reader.texts

    @property
    def num_open(self) -> int:
        """Accepted requests that have not ended."""
        return len(self._open)

    def end_all(self, error: MillraceError) -> None:
        """Ends what still runs with `error`, which each client is told."""
        for generation in list(self._open):
            generation.end(error)

    def served_names(self, caller: Caller) -> list[str]:
        """Names of models that the caller may ask for."""
        served = self._all_names()
        allowed = caller.identity.allowed_models
        return [name for name in served if not allowed or name in allowed]

    def check_model(self, caller: Caller, name: str) -> None:
        """Raises MODEL_NOT_FOUND or MODEL_NOT_ALLOWED."""
        if name in self._own_names and not caller.identity.allowed_models:
            return
        check_model_name(name)
        usable = self.served_names(caller)
        if name in usable:
            return
        if name not in self._all_names():
            reason, problem = Reason.MODEL_NOT_FOUND, f"model {name!r} is not served here"
        else:
            reason = Reason.MODEL_NOT_ALLOWED
            problem = f"key {caller.identity.key_id} may not use model {name!r}"
        raise MillraceError(reason, f"{problem}; available: {', '.join(usable) or 'none'}", field="model")

    def _all_names(self) -> tuple[str, ...]:
        # Adapters are asked for by their own names, as models.
        return (self.model.served_name, *self.model.aliases, *self.fleet.adapters)

    def _adapter(self, name: str) -> str:
        return "" if name in self._own_names else name

    async def encode(
        self, caller: Caller, request: GenerationRequest, special_tokens: bool | None = None
    ) -> Sequence[int]:
        """Token ids of a request's prompt, which nothing is generated for."""
        prompt = request.prompt
        assert not isinstance(prompt, TokenPrompt), "what is encoded already needs no encoding"
        tier = self._tiers.resolve(caller.identity, "")
        try:
            # All names stand for one vocabulary.
            return await self.tokenizer.tokenize(
                self.model.served_name,
                prompt,
                add_special_tokens=special_tokens,
                context=self.callers.sign(caller, tier, ("", "")),
            )
        except MillraceError as error:
            raise request.tell(error) from error

    async def decode(self, caller: Caller, token_ids: Sequence[int], field: str) -> str:
        """Text of token ids; raises INVALID_ARGUMENT below `field` for one that the model does not have."""
        size = self.vocabulary.size
        decoder, pieces = detokenizer(self.texts), []
        async with self.intake.turn(caller.identity.tenant) as slices:
            for start in range(0, len(token_ids), _DECODED_AT_ONCE):
                some = token_ids[start : start + _DECODED_AT_ONCE]
                for index, token_id in enumerate(some):
                    if not 0 <= token_id < size:
                        raise invalid(f"{field}[{start + index}]", outside(token_id, size))
                pieces.append(decoder.feed(some))
                await slices.breathe()
        return "".join([*pieces, decoder.finish()])

    async def begin(self, caller: Caller, request: GenerationRequest) -> Generation:
        """Accepts or refuses. The result must be used as a context manager, which settles it."""
        span = self._telemetry.start(
            names.GATEWAY_REQUEST, parent=caller.trace, kind=SpanKind.SERVER, start_s=caller.received_s
        )
        tier_name = caller.identity.tier
        call = None
        try:
            if self.draining:
                raise MillraceError(
                    Reason.DRAINING,
                    "this gateway is shutting down; send the request again",
                    retry_after_s=1.0,
                )
            validate(request, self.intake.limits)
            self.check_model(caller, request.model)
            check_vocabulary(request, self.vocabulary.size)
            self._reader.check(request)
            tier = self._tiers.resolve(caller.identity, request.service_tier)
            tier_name = tier.name
            call = Call(caller, request, tier, span, self._telemetry)
            generation = await self._accept(call)
        except BaseException as error:
            if call is not None:
                self._deferred.call(call.tell)
            self._deferred.call(
                self._recorder.refused,
                span,
                caller,
                request,
                tier_name,
                # A name that is not served is a client's own word.
                request.model if request.model in self._all_names() else "",
                error,
                time.monotonic(),
            )
            told = request.tell(error) if isinstance(error, MillraceError) else error
            if told is error:
                raise
            raise told from error
        # Not with the answer's end: what is expected of a queue would overwrite what was expected later.
        self._deferred.call(call.tell)
        return generation

    async def _accept(self, call: Call) -> Generation:
        caller, request = call.caller, call.request
        context = self.callers.sign(caller, call.tier, call.traceparent)
        prepared = await self._prepare(call, context)
        num_prompt_tokens = len(prepared.token_ids)
        limit = token_limit(self._model_limit(), call.tier.config.max_context_tokens)
        max_tokens = completion_limit(request, num_prompt_tokens, limit)
        max_tokens = ranked_tokens(request, max_tokens, self.intake.limits)
        sampling = complete(
            request.sampling,
            checkpoint=self._checkpoint,
            max_tokens=max_tokens,
            eos_token_ids=self.vocabulary.eos_token_ids,
        )
        reservation = await self._reserve(call, num_prompt_tokens, sampling)
        try:
            if sampling.ranks_at_the_end and reservation.is_short:
                sampling = shortened(sampling, reservation.tokens_per_sequence)
            with call.step(names.GATEWAY_ADMIT) as step:
                wait_s = expected_wait_s(self.fleet, call.tier.config.pool)
                call.later(self._note_wait, step.attributes, wait_s, call.tier.name)
            with call.step(names.GATEWAY_ROUTE) as routing:
                stream = self._route(call, prepared, sampling, context)
                submitted_s = time.monotonic()
                await _let_go(stream)
                call.later(self._note_route, routing.attributes, stream.engine, stream.route)
            return self._generation(call, prepared, sampling, stream, submitted_s, reservation, context)
        except BaseException:
            await reservation.cancel()
            raise

    def _note_wait(self, attributes: dict[str, Any], wait_s: float, tier: str) -> None:
        attributes[names.EXPECTED_WAIT_MS] = wait_s * 1000
        self._metrics.set(names.EXPECTED_WAIT, wait_s, tier=tier)

    async def _prepare(self, call: Call, context: Any) -> Prepared:
        with call.step(names.GATEWAY_PREPARE) as step:
            prepared = await self.tokenizer.prepare(
                # An adapter has the vocabulary of the model that it adapts.
                model=self.model.served_name if self._adapter(call.request.model) else call.request.model,
                prompt=call.request.prompt,
                response_format=call.request.response_format,
                context=context,
                tenant=call.caller.identity.tenant,
                traceparent=call.traceparent,
                timeout_s=call.caller.remaining_s(),
                max_prompt_tokens=token_limit(self.fleet.max_model_len, call.tier.config.max_context_tokens),
            )
        call.later(self._metrics.observe, names.PREPARE_SECONDS, step.end_s - step.start_s)
        if prepared.vocabulary_fingerprint != self.vocabulary.fingerprint:
            raise MillraceError(
                Reason.VOCABULARY_MISMATCH,
                "the tokenizer service serves another vocabulary than when this gateway started; "
                "restart the gateway",
            )
        return prepared

    async def _reserve(self, call: Call, num_prompt_tokens: int, sampling: SamplingParams) -> Reservation:
        asked, num_sequences = call.request.sampling.max_tokens, 1
        if sampling.ranks_at_the_end:
            # Nothing of them is seen before all is computed: all that they may take is reserved.
            asked, num_sequences = sampling.max_tokens, max(sampling.best_of, sampling.beam_width)
        elif asked is not None:
            asked *= sampling.best_of
        with call.step(names.GATEWAY_RESERVE):
            return await self.limiter.reserve(
                call.caller.identity,
                num_prompt_tokens,
                asked,
                num_sequences=num_sequences,
                model=call.request.model,
                tier=call.tier,
            )

    def _route(
        self, call: Call, prepared: Prepared, sampling: SamplingParams, context: Any
    ) -> ContinuousStream:
        caller, tier = call.caller, call.tier
        stream = ContinuousStream(
            self.fleet,
            Submission(
                context=context,
                prompt_token_ids=prepared.token_ids,
                sampling=sampling,
                grammar=prepared.grammar,
                request_id=caller.identity.request_id,
                cache_salt=caller.identity.cache_salt,
                adapter=self._adapter(call.request.model),
                pool=tier.config.pool,
                affinity=call.request.prompt_cache_key,
            ),
            renew=lambda: self.callers.sign(caller, tier.accepted, call.traceparent),
            tell=call.request.tell,
            backlog=self.intake.backlog(caller.identity.tenant),
        )
        stream.start()
        return stream

    def _note_route(self, attributes: dict[str, Any], engine: str, route: Route | None) -> None:
        assert route is not None, "a stream that was started has a route"
        attributes[names.ENGINE_ID] = engine
        attributes[names.ROUTE_REASON] = route.reason.value
        attributes[names.ROUTE_PREFIX_TOKENS] = route.prefix_tokens
        self._metrics.add(names.ROUTED, engine=engine, reason=route.reason.value)

    def _generation(
        self,
        call: Call,
        prepared: Prepared,
        sampling: SamplingParams,
        stream: ContinuousStream,
        submitted_s: float,
        reservation: Reservation,
        context: Any,
    ) -> Generation:
        caller, request = call.caller, call.request
        observe_gap = self._metrics.observer(names.ITL, model=request.model, tier=call.tier.name)
        meter = Meter(caller.received_s, observe_gap)
        meter.submitted_s = submitted_s
        generation = Generation(
            info=AnswerInfo(
                request_id=caller.identity.request_id,
                model=request.model,
                adapter=self._adapter(request.model),
                created_unix_s=int(time.time()),
                service_tier=call.tier.name,
                prompt_token_ids=prepared.token_ids,
                num_choices=sampling.n,
                enforcement=prepared.enforcement,
            ),
            stream=stream,
            choices=self._reader.choices(request, prepared, caller.identity.request_id, sampling.n),
            reservation=reservation,
            meter=meter,
            entry=self._recorder.begun(call, sampling.n, reservation.holds),
            discard_tokens=request.sampling.max_tokens == 0,
            settle=partial(self._settled, call),
            judge=self._judge(call, prepared, context),
            transcript=Transcript() if self._telemetry.config.capture_content else None,
        )
        self._open.add(generation)
        self._count_active(call.tier, 1)
        if caller.deadline_s is not None:
            generation.expire_at(caller.deadline_s)
        return generation

    def _judge(self, call: Call, prepared: Prepared, context: Any) -> OutputJudge | None:
        report, form = prepared.enforcement, call.request.response_format
        if not isinstance(form, JsonSchemaFormat) or report is None:
            return None
        if not (report.approximated or report.unenforced):
            return None
        model, schema_json = call.request.model, form.schema_json
        return OutputJudge(lambda text: self.tokenizer.validate(model, schema_json, text, context=context))

    def _count_active(self, tier: Tier, change: int) -> None:
        if tier.name not in self._num_active:
            # Read when it is scraped.
            number = partial(self._num_active.__getitem__, tier.name)
            self._metrics.set_function(names.ACTIVE_STREAMS, number, tier=tier.name)
        self._num_active[tier.name] = self._num_active.get(tier.name, 0) + change

    def _settled(self, call: Call, generation: Generation, outcome: Outcome, usage: Usage) -> None:
        self._open.discard(generation)
        self._count_active(call.tier, -1)
        if generation.stream.num_losses:
            # Seldom, and whoever looks for it looks at once.
            self._note_continuations(call, generation, outcome)
        end = Ended(
            call=call,
            generation=generation,
            outcome=outcome,
            usage=usage,
            monotonic_s=time.monotonic(),
            unix_s=time.time(),
        )
        self._deferred.call(self._tell, end)

    def _tell(self, end: Ended) -> None:
        first_s = end.generation.meter.first_output_s
        if first_s is not None:
            self._telemetry.tell_step(
                names.GATEWAY_STREAM, of=end.call.span, start_s=first_s, end_s=end.monotonic_s
            )
        self._recorder.ended(end)

    def _note_continuations(self, call: Call, generation: Generation, outcome: Outcome) -> None:
        result = "failed" if outcome.name == Reason.ENGINE_LOST.value else "continued"
        self._metrics.add(names.RESUBMISSIONS, generation.stream.num_losses, outcome=result)
        for start_s, end_s in generation.stream.interruptions:
            self._telemetry.record(names.GATEWAY_RESUBMIT, start_s=start_s, end_s=end_s, parent=call.span)

    def _model_limit(self) -> int:
        limit = self.fleet.max_model_len
        if not limit:
            raise self.fleet.unavailable()
        return limit


async def _let_go(stream: ContinuousStream) -> None:
    """Lets the submission leave: what is left to do is done while the engine works."""
    try:
        # Submissions are written in the next turn of the event loop.
        await asyncio.sleep(0)
    except BaseException:
        stream.cancel(CancelReason.CLIENT)
        raise
