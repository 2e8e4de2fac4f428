"""prepare → reserve → admit → route → stream → settle: what happens to every request, whichever face it
came by.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from opentelemetry.trace import SpanKind

from contract.chat import JsonSchemaFormat, TokenPrompt
from contract.engines import CancelReason
from contract.errors import MillraceError, Reason, invalid
from contract.sampling import SamplingParams, outside
from gateway.auth.verifier import CallerVerifier
from gateway.engines.continuation import ContinuousStream
from gateway.engines.fleet import Route
from gateway.engines.types import Submission
from gateway.limits.limiter import TokenLimiter
from gateway.limits.reservation import Reservation
from gateway.models.catalog import Catalog, ServedModel, Target
from gateway.pipeline import fallback
from gateway.pipeline.admission import expected_wait_s
from gateway.pipeline.call import Call
from gateway.pipeline.defaults import complete, completion_limit, shortened, token_limit
from gateway.pipeline.delta import AnswerInfo, Usage
from gateway.pipeline.generation import Generation, Outcome
from gateway.pipeline.intake import Intake
from gateway.pipeline.judge import OutputJudge
from gateway.pipeline.metering import Meter
from gateway.pipeline.outcome import Ended, OutcomeRecorder
from gateway.pipeline.reading import AnswerReader
from gateway.pipeline.shadow import Shadows
from gateway.pipeline.transcript import Transcript
from gateway.pipeline.validate import check_streams, check_vocabulary, ranked_tokens, validate
from gateway.text.detokenizer import detokenizer
from gateway.tiers import Tier, Tiers
from gateway.tokenizer.client import TokenizerClient
from gateway.types.caller import Caller
from gateway.types.prepared import Prepared
from gateway.types.request import GenerationRequest
from observability.emit import names
from observability.emit.tracing import Telemetry
from runtime.deferred import Deferred

# Token ids that become text at once, in less than a millisecond.
_DECODED_AT_ONCE = 4096


class Pipeline:
    """Turns requests into generations."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        tokenizer: TokenizerClient,
        limiter: TokenLimiter,
        tiers: Tiers,
        callers: CallerVerifier,
        recorder: OutcomeRecorder,
        telemetry: Telemetry,
        deferred: Deferred,
        intake: Intake,
        shadows: Shadows,
    ) -> None:
        self.catalog = catalog
        self.intake = intake
        self.shadows = shadows
        self.tokenizer = tokenizer
        self.fleet = catalog.fleet
        self.limiter = limiter
        self.callers = callers
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
        self._metrics.begin(names.RESUBMISSIONS)
        self._telemetry = telemetry
        # By model: one that is served no more is forgotten with its last request.
        self._readers: WeakKeyDictionary[ServedModel, AnswerReader] = WeakKeyDictionary()

    @property
    def num_open(self) -> int:
        """Accepted requests that have not ended."""
        return len(self._open)

    def end_all(self, error: MillraceError) -> None:
        """Ends what still runs with `error`, which each client is told."""
        for generation in list(self._open):
            generation.end(error)

    def reader(self, served: ServedModel) -> AnswerReader:
        """How answers of a model are read."""
        found = self._readers.get(served)
        if found is None:
            found = self._readers[served] = AnswerReader(served)
        return found

    def model(self, caller: Caller, name: str | None) -> ServedModel:
        """The model for what generates nothing; without a name any that the caller may use. Raises
        MODEL_NOT_FOUND or MODEL_NOT_ALLOWED.
        """
        if name is None:
            name = next(iter(self.catalog.names(caller.identity)), next(iter(self.catalog.served), ""))
        self.catalog.check(caller.identity, name)
        found = self.catalog.any_of(name)
        if found is None:
            raise self.fleet.unavailable()
        return found

    def reasons(self, name: str) -> bool:
        """Whether what is asked for under a name reasons before it answers."""
        found = self.catalog.any_of(name)
        return found is not None and bool(found.vocabulary.reasoning_format)

    def max_model_len(self, served: ServedModel) -> int:
        """Longest prompt plus completion of a model; 0 while no engine is attached."""
        of_engines, of_model = self.fleet.max_model_len(served.key), served.config.max_context_tokens
        return min(of_engines, of_model) if of_model else of_engines

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
            return await self.tokenizer.tokenize(
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
        decoder, pieces = detokenizer(self.reader(served).texts), []
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
            self.catalog.check(caller.identity, request.model)
            tier = self._tiers.resolve(caller.identity, request.service_tier)
            tier_name = tier.name
            if request.num_streams > 1 and (most := self.limiter.stream_limit(caller.identity, tier)):
                check_streams(request, *most)
            target = self.catalog.resolve(
                caller.identity, request.model, tier=tier.name, cache_key=request.prompt_cache_key
            )
            call = Call(caller, request, tier, target, span, self._telemetry)
            generation = await self._accept_or_fall_back(call)
        except BaseException as error:
            if call is not None:
                self._deferred.call(call.tell)
            if call is None or not call.is_told:
                # A name that is not served is a client's own word.
                model, end_s = request.model if self.catalog.knows(request.model) else "", time.monotonic()
                refused = partial(self._recorder.refused, span, caller, request, tier_name)
                self._deferred.call(refused, model, error, end_s)
            # A name for any other would keep it, with all of the request, until the collector comes by.
            if not isinstance(error, MillraceError):
                raise
            told = request.tell(error)
            if told is error:
                raise
            raise told from error
        # Not with the answer's end: what is expected of a queue would overwrite what was expected later.
        self._deferred.call(call.tell)
        return generation

    async def _accept_or_fall_back(self, call: Call) -> Generation:
        other = fallback.cheaper(self.catalog, call)
        if other is None:
            return await self._accept(call)
        refused = None
        try:
            refused = await self._accept(call)
            refusal = await refused.refusal()
        except MillraceError as error:
            refusal = error
            if not fallback.is_overload(error):
                raise
        except BaseException as error:
            if refused is not None:
                await self._abandon(call, refused, error)
            raise
        if refusal is not None and fallback.is_overload(refusal):
            return await self._fall_back(call, other, refused, refusal)
        assert refused is not None, "it was accepted, or its refusal was raised"
        return refused

    async def _fall_back(
        self, call: Call, other: Target, refused: Generation | None, refusal: MillraceError
    ) -> Generation:
        """The other model's answer; where that refuses too, what the first one said is told."""
        asked = call.target
        if refused is not None:
            await refused.let_go()
        call.target, call.fallback_from = other, asked.told
        try:
            generation = await self._accept(call)
        except BaseException as error:
            call.target, call.fallback_from = asked, ""
            if not isinstance(error, MillraceError):
                if refused is not None:
                    await self._abandon(call, refused, error)
                raise
            if refused is None:
                raise refusal from error
            return refused
        if refused is not None and await self._refuses_too(call, generation):
            self._supersede(call, generation)
            await generation.let_go()
            call.target, call.fallback_from = asked, ""
            return refused
        if refused is not None:
            self._supersede(call, refused)
        self._metrics.add(
            names.FALLBACKS,
            model=asked.told,
            fallback=other.told,
            tier=call.tier.name,
            reason=refusal.reason.value,
        )
        return generation

    async def _refuses_too(self, call: Call, generation: Generation) -> bool:
        try:
            return await generation.refusal() is not None
        except BaseException as error:
            await self._abandon(call, generation, error)
            raise

    def _supersede(self, call: Call, generation: Generation) -> None:
        """Another one has its place, and its entry in the ledger."""
        generation.replaced()
        self._open.discard(generation)
        self._count_active(call.tier, -1)

    async def _abandon(self, call: Call, generation: Generation, error: BaseException) -> None:
        """Settles what no face has got; that is all that is told of it."""
        call.is_told = True
        await generation.close(error)

    async def _accept(self, call: Call) -> Generation:
        caller, request, served = call.caller, call.request, call.target.served
        reader = self.reader(served)
        check_vocabulary(request, served.vocabulary.size)
        reader.check(request)
        context = self.callers.sign(caller, call.tier, call.traceparent, served.key)
        prepared = await self._prepare(call, context)
        num_prompt_tokens = len(prepared.token_ids)
        limit = token_limit(self._model_limit(served), call.tier.config.max_context_tokens)
        max_tokens = completion_limit(request, num_prompt_tokens, limit)
        max_tokens = ranked_tokens(request, max_tokens, self.intake.limits)
        sampling = complete(
            request.sampling,
            checkpoint={**reader.checkpoint, **served.config.defaults},
            max_tokens=max_tokens,
            eos_token_ids=served.vocabulary.eos_token_ids,
        )
        reservation = await self._reserve(call, num_prompt_tokens, sampling)
        try:
            if sampling.ranks_at_the_end and reservation.is_short:
                sampling = shortened(sampling, reservation.tokens_per_sequence)
            with call.step(names.GATEWAY_ADMIT) as step:
                wait_s = expected_wait_s(self.fleet, served.key, call.tier.config.pool)
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
        served = call.target.served
        with call.step(names.GATEWAY_PREPARE) as step:
            prepared = await self.tokenizer.prepare(
                # An adapter has the vocabulary of the model that it adapts.
                model=served.key,
                prompt=call.request.prompt,
                response_format=call.request.response_format,
                context=context,
                tenant=call.caller.identity.tenant,
                traceparent=call.traceparent,
                timeout_s=call.caller.remaining_s(),
                max_prompt_tokens=token_limit(
                    self.max_model_len(served), call.tier.config.max_context_tokens
                ),
            )
        call.later(self._metrics.observe, names.PREPARE_SECONDS, step.end_s - step.start_s)
        if prepared.vocabulary_fingerprint != served.vocabulary.fingerprint:
            raise MillraceError(
                Reason.VOCABULARY_MISMATCH,
                f"the tokenizer service has another vocabulary of model {served.key!r} than when this "
                "gateway asked for it; give what has changed another revision, or restart the gateway",
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
                num_streams=call.request.num_streams,
                model=call.target.told,
                tier=call.tier,
            )

    def _route(
        self, call: Call, prepared: Prepared, sampling: SamplingParams, context: Any
    ) -> ContinuousStream:
        caller, tier, served = call.caller, call.tier, call.target.served
        stream = ContinuousStream(
            self.fleet,
            Submission(
                context=context,
                prompt_token_ids=prepared.token_ids,
                sampling=sampling,
                grammar=prepared.grammar,
                request_id=caller.identity.request_id,
                entry_id=call.entry_id,
                cache_salt=caller.identity.cache_salt,
                adapter=call.target.adapter,
                pool=tier.config.pool,
                model=served.key,
                checkpoint=served.config.path,
                affinity=call.request.prompt_cache_key,
            ),
            renew=lambda: self.callers.sign(caller, tier.accepted, call.traceparent, served.key),
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
        caller, request, target = call.caller, call.request, call.target
        reader = self.reader(target.served)
        observe_gap = self._metrics.observer(names.ITL, model=target.told, tier=call.tier.name)
        meter = Meter(caller.received_s, observe_gap)
        meter.submitted_s = submitted_s
        info = AnswerInfo(
            request_id=caller.identity.request_id,
            model=target.told,
            revision=target.served.revision,
            adapter=target.adapter,
            created_unix_s=int(time.time()),
            service_tier=call.tier.name,
            openai_tier=call.tier.openai_name,
            prompt_token_ids=prepared.token_ids,
            num_choices=sampling.n,
            enforcement=prepared.enforcement,
        )
        generation = Generation(
            info=info,
            reader=reader,
            stream=stream,
            choices=reader.choices(request, prepared, caller.identity.request_id, sampling.n),
            reservation=reservation,
            meter=meter,
            entry=self._recorder.begun(call, info, reservation.holds),
            discard_tokens=request.sampling.max_tokens == 0,
            settle=partial(self._settled, call),
            judge=self._judge(call, prepared, context),
            transcript=Transcript() if self._telemetry.config.capture_content else None,
        )
        if self.shadows.wants(call):
            generation.kept_ids = []
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
        model, schema_json = call.target.served.key, form.schema_json
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
        self.shadows.offer(end)

    def _note_continuations(self, call: Call, generation: Generation, outcome: Outcome) -> None:
        result = "failed" if outcome.name == Reason.ENGINE_LOST.value else "continued"
        self._metrics.add(names.RESUBMISSIONS, generation.stream.num_losses, outcome=result)
        for start_s, end_s in generation.stream.interruptions:
            self._telemetry.record(names.GATEWAY_RESUBMIT, start_s=start_s, end_s=end_s, parent=call.span)

    def _model_limit(self, served: ServedModel) -> int:
        limit = self.max_model_len(served)
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
