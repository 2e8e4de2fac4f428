"""Opens attempts: prepare → limit → reserve → stream. What happens to every submission, whoever asks for it.

`Pipeline` opens those of clients; a shadow's are opened here as well, without limits and without books.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import msgspec

from contract.chat import JsonSchemaFormat
from contract.engines import CancelReason
from contract.errors import MillraceError, Reason
from contract.pooling import PoolingParams
from contract.sampling import SamplingParams
from contract.thinking import ThinkingTags
from gateway.auth.verifier import CallerVerifier
from gateway.config import EffortsConfig
from gateway.engines.continuation import ContinuousStream
from gateway.engines.fleet import Fleet, Route
from gateway.engines.split import SplitStream
from gateway.engines.text_stream import TextStream
from gateway.engines.types import Submission
from gateway.intake.intake import Intake
from gateway.limits.limiter import Reservation, TokenLimiter
from gateway.models.catalog import ServedModel, Target
from gateway.pipeline.attempt import Attempt, AttemptBooks
from gateway.pipeline.call import Call
from gateway.pipeline.delta import AnswerInfo, AnswerReader, Echo, Meter
from gateway.pipeline.judge import OutputJudge
from gateway.pipeline.pooled import Cut, PooledAttempt, check_task, pooled_prompt, submitted_texts
from gateway.pipeline.transcript import Transcript
from gateway.pipeline.validate import (
    check_vocabulary,
    complete,
    completion_limit,
    prompt_limit,
    ranked_tokens,
    shortened,
    token_limit,
    uncut,
)
from gateway.tiers import Tier
from gateway.tokenizer.client import TokenizerClient
from gateway.types.deliberation import Deliberation
from gateway.types.request import GenerationRequest, Prepared
from observability.emit import names
from observability.emit.metrics import Metrics


def expected_wait_s(fleet: Fleet, model: str, pool: str) -> float:
    """Seconds that the prompts before a new request for a version of a model take, at the engine that is
    through with them first, of `pool` if one is named; 0 while nothing was measured. It decides nothing:
    engines know their queues, and accept or refuse.
    """
    return min(
        (
            max(load.pending_prefill_tokens, attachment.unstarted_tokens) / load.prefill_tokens_per_s
            if (load := attachment.load).prefill_tokens_per_s
            else 0.0
            for attachment in fleet.ready
            # An engine is ready after it has reported what it is.
            if (info := attachment.info) is not None and info.model_key == model and pool in ("", info.pool)
        ),
        default=0.0,
    )


class Deliberates(Protocol):
    """Thinks longer for requests that ask for it."""

    def admitted(self, request: GenerationRequest, tier: Tier) -> GenerationRequest:
        """The request with what its tier lets it have; raises why it may not."""
        ...

    async def of_a_sample(
        self, call: Call, served: ServedModel, sampling: SamplingParams, context: Any
    ) -> SamplingParams:
        """The options of each sample, after what scores them was asked whether it can."""
        ...

    def most_tokens(self, ask: Deliberation, sampling: SamplingParams) -> int:
        """Generated tokens that all samples may take together."""
        ...

    def stream(
        self,
        call: Call,
        prepared: Prepared,
        reader: AnswerReader,
        budget_tokens: int,
        fleet: Fleet,
        submission: Submission,
        **options: Any,
    ) -> ContinuousStream:
        """The stream of an attempt, which gives one answer."""
        ...


class Attempts:
    """Makes attempts of calls: of one call as many as are wanted, each to a model of its own."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        tokenizer: TokenizerClient,
        limiter: TokenLimiter,
        callers: CallerVerifier,
        metrics: Metrics,
        intake: Intake,
        efforts: EffortsConfig,
        keeps_transcripts: bool = False,
    ) -> None:
        self.fleet = fleet
        self.tokenizer = tokenizer
        self.limiter = limiter
        self.callers = callers
        self.intake = intake
        # For requests that think longer; set where it is built.
        self.deliberates: Deliberates | None = None
        self._metrics = metrics
        self._efforts = efforts
        self._keeps_transcripts = keeps_transcripts
        # By model: one that is served no more is forgotten with its last request.
        self._readers: WeakKeyDictionary[ServedModel, AnswerReader] = WeakKeyDictionary()

    def reader(self, served: ServedModel) -> AnswerReader:
        """How answers of a model are read."""
        found = self._readers.get(served)
        if found is None:
            found = self._readers[served] = AnswerReader(served, self._efforts)
        return found

    def max_model_len(self, served: ServedModel) -> int:
        """Longest prompt plus completion of a model, or longest text that it pools; 0 while no engine is
        attached.
        """
        pooled, limits = served.vocabulary.pooled, [self.fleet.max_model_len(served.key)]
        if of_model := served.config.max_context_tokens:
            limits.append(of_model)
        if pooled is not None and pooled.max_tokens:
            limits.append(pooled.max_tokens)
        return min(limits)

    async def open(
        self,
        call: Call,
        target: Target,
        books: AttemptBooks,
        *,
        fallback_from: str = "",
        is_limited: bool = True,
        seed: int | None = None,
    ) -> Attempt:
        """An attempt whose submission is with an engine; raises before anything is held, or gives it back.

        Without `is_limited` nothing is charged. `seed` takes the place of the request's own.
        """
        request, served = call.request, target.served
        if request.pooling is not None or served.vocabulary.pooled is not None:
            check_task(request, served)
        reader = self.reader(served)
        check_vocabulary(request, served.vocabulary.tokens)
        reader.check(request)
        context = self.callers.sign(call.caller, call.tier, call.traceparent, served.key)
        prepared = await self._prepare(call, served, context)
        self._note_asked(call.tier, served, len(prepared.token_ids))
        if request.pooling is not None:
            sampling, thinking = self._no_sampling(served), None
        else:
            sampling = self._sampling(call, served, len(prepared.token_ids))
            most = call.tier.config.max_thinking_tokens
            sampling, thinking = reader.thoughts.held(request, prepared, sampling, most)
        if seed is not None:
            sampling = msgspec.structs.replace(sampling, seed=seed)
        if self.deliberates is not None and request.test_time is not None:
            sampling = await self.deliberates.of_a_sample(call, served, sampling, context)
        reservation = await self._reserve(call, target, len(prepared.token_ids), sampling, is_limited)
        try:
            if reservation.is_short and (sampling.ranks_at_the_end or _deliberates(call)):
                # Of samples each may have what is left for all, so that the first one is not in vain.
                sampling = shortened(sampling, min(sampling.max_tokens, reservation.tokens_per_sequence))
            with call.step(names.GATEWAY_ADMIT) as step:
                wait_s = expected_wait_s(self.fleet, served.key, call.tier.config.pool)
                call.later(self._note_wait, step.attributes, wait_s, call.tier.name)
            with call.step(names.GATEWAY_ROUTE) as routing:
                make_stream = self._maker(call, target, prepared, sampling, reservation)
                stream = self._route(call, target, prepared, sampling, thinking, context, make_stream)
                submitted_s = time.monotonic()
                await _let_go(stream)
                call.later(self._note_route, routing.attributes, stream.engine, stream.route)
            meter = Meter(call.caller.received_s, books.gap_observer(call, target), submitted_s)
            parts: dict[str, Any] = {
                "call": call,
                "target": target,
                "fallback_from": fallback_from,
                "reader": reader,
                "stream": stream,
                "reservation": reservation,
                "meter": meter,
                "books": books,
            }
            if request.pooling is not None:
                info = _info(call, target, prepared, sampling, None)
                attempt: Attempt = PooledAttempt(texts=prepared.texts, info=info, **parts)
            else:
                attempt = self._generating(prepared, sampling, context, parts)
        except BaseException:
            await reservation.cancel()
            raise
        if call.caller.deadline_s is not None:
            attempt.expire_at(call.caller.deadline_s)
        return attempt

    def _note_asked(self, tier: Tier, served: ServedModel, num_prompt_tokens: int) -> None:
        """It is work to come, also where no engine serves the model yet."""
        target_ms = tier.config.tpot_target_ms
        target_s = None if target_ms is None else target_ms / 1000
        self.fleet.note_asked(served.key, tier.config.pool, num_prompt_tokens, target_s)

    def _generating(
        self, prepared: Prepared, sampling: SamplingParams, context: Any, parts: dict[str, Any]
    ) -> Attempt:
        """The attempt of a model that generates; `parts` is what every attempt has."""
        call: Call = parts["call"]
        reader: AnswerReader = parts["reader"]
        echo = reader.echo(call.request, prepared)
        request_id = call.caller.identity.request_id
        return Attempt(
            info=_info(call, parts["target"], prepared, sampling, echo),
            choices=reader.choices(call.request, prepared, request_id, sampling.n, echo),
            judge=self._judge(call, parts["target"], prepared, context),
            transcript=Transcript() if self._keeps_transcripts else None,
            **parts,
        )

    async def _prepare(self, call: Call, served: ServedModel, context: Any) -> Prepared:
        limit = token_limit(self.max_model_len(served), call.tier.config.max_context_tokens)
        request = call.request
        if request.pooling is not None:
            prompt, cut = pooled_prompt(request, served, limit)
        else:
            truncates = request.truncate_prompt_tokens is not None
            prompt, cut = request.prompt, Cut(prompt_limit(request, limit), truncates, keeps_start=False)
        prepare: Callable[..., Awaitable[Prepared]] = self.tokenizer.prepare
        if request.pooling is not None:
            prepare = self.tokenizer.prepare_texts
        with call.step(names.GATEWAY_PREPARE) as step:
            try:
                prepared = await prepare(
                    # An adapter has the vocabulary of the model that it adapts.
                    model=served.key,
                    prompt=prompt,
                    response_format=request.response_format,
                    context=context,
                    tenant=call.caller.identity.tenant,
                    traceparent=call.traceparent,
                    timeout_s=call.caller.remaining_s(),
                    max_prompt_tokens=cut.max_tokens,
                    truncates=cut.truncates,
                    keeps_start=cut.keeps_start,
                )
            except MillraceError as error:
                if (shown := uncut(request, error, limit, cut.max_tokens)) is error:
                    raise
                raise shown from error
        call.later(self._metrics.observe, names.PREPARE_SECONDS, step.end_s - step.start_s)
        if prepared.vocabulary_fingerprint != served.vocabulary.fingerprint:
            raise MillraceError(
                Reason.VOCABULARY_MISMATCH,
                f"the tokenizer service has another vocabulary of model {served.key!r} than when this "
                "gateway asked for it; give what has changed another revision, or restart the gateway",
            )
        return prepared

    def _sampling(self, call: Call, served: ServedModel, num_prompt_tokens: int) -> SamplingParams:
        """The request's, completed by what the model's files and its configuration say."""
        longest = self.max_model_len(served)
        if not longest:
            raise self.fleet.unavailable(model=served.key)
        configured = [call.tier.config.max_context_tokens, served.config.max_context_tokens]
        limit = token_limit(longest, call.tier.config.max_context_tokens)
        beyond = min((each for each in configured if each), default=None)
        max_tokens = completion_limit(call.request, num_prompt_tokens, limit, beyond)
        reader = self.reader(served)
        return complete(
            call.request.sampling,
            defaults=reader.defaults_of(call.request),
            watches_ids=reader.watches_ids(call.request),
            max_tokens=ranked_tokens(call.request, max_tokens, self.intake.limits),
            eos_token_ids=served.vocabulary.eos_token_ids,
        )

    def _no_sampling(self, served: ServedModel) -> SamplingParams:
        """What an engine is told of a request for which nothing is generated."""
        if not self.max_model_len(served):
            raise self.fleet.unavailable(model=served.key)
        return SamplingParams(temperature=0.0, max_tokens=1)

    async def _reserve(
        self, call: Call, target: Target, num_prompt_tokens: int, sampling: SamplingParams, is_limited: bool
    ) -> Reservation:
        if not is_limited:
            return self.limiter.unlimited()
        asked, num_sequences = call.request.sampling.max_tokens, 1
        if self.deliberates is not None and (ask := _deliberates(call)) is not None:
            asked = self.deliberates.most_tokens(ask, sampling)
        elif sampling.ranks_at_the_end:
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
                model=target.told,
                tier=call.tier,
                age_s=time.monotonic() - call.caller.received_s,
            )

    def _route(
        self,
        call: Call,
        target: Target,
        prepared: Prepared,
        sampling: SamplingParams,
        thinking: ThinkingTags | None,
        context: Any,
        make_stream: Callable[..., ContinuousStream],
    ) -> ContinuousStream:
        caller, tier, served = call.caller, call.tier, target.served
        asked = call.request.pooling
        pooling = None if asked is None else PoolingParams(task=asked.task, dimensions=asked.dimensions)
        stream = make_stream(
            self.fleet,
            Submission(
                context=context,
                prompt_token_ids=prepared.token_ids,
                sampling=sampling,
                grammar=prepared.grammar,
                pooling=pooling,
                texts=() if asked is None else submitted_texts(prepared),
                thinking=thinking,
                retention=call.request.retention,
                request_id=caller.identity.request_id,
                entry_id=call.entry_id,
                cache_salt=caller.identity.cache_salt,
                adapter=target.adapter,
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

    def _maker(
        self,
        call: Call,
        target: Target,
        prepared: Prepared,
        sampling: SamplingParams,
        reservation: Reservation,
    ) -> Callable[..., ContinuousStream]:
        """What makes the stream of a call."""
        ask = call.request.test_time
        if self.deliberates is None or ask is None:
            return SplitStream if call.request.pooling is None else TextStream
        budget = self.deliberates.most_tokens(ask, sampling)
        if reservation.is_short:
            budget = min(budget, reservation.charges.completion_tokens)
        return partial(self.deliberates.stream, call, prepared, self.reader(target.served), budget)

    def _judge(self, call: Call, target: Target, prepared: Prepared, context: Any) -> OutputJudge | None:
        report, form = prepared.enforcement, call.request.response_format
        if not isinstance(form, JsonSchemaFormat) or report is None:
            return None
        if not (report.approximated or report.unenforced):
            return None
        model, schema_json = target.served.key, form.schema_json
        return OutputJudge(lambda text: self.tokenizer.validate(model, schema_json, text, context=context))

    def _note_wait(self, attributes: dict[str, Any], wait_s: float, tier: str) -> None:
        attributes[names.EXPECTED_WAIT_MS] = wait_s * 1000
        self._metrics.set(names.EXPECTED_WAIT, wait_s, tier=tier)

    def _note_route(self, attributes: dict[str, Any], engine: str, route: Route | None) -> None:
        assert route is not None, "a stream that was started has a route"
        attributes[names.ENGINE_ID] = engine
        attributes[names.ROUTE_REASON] = route.reason.value
        attributes[names.ROUTE_PREFIX_TOKENS] = route.prefix_tokens
        self._metrics.add(names.ROUTED, engine=engine, reason=route.reason.value)


def _deliberates(call: Call) -> Deliberation | None:
    """How it does, unless it has the plain answer instead."""
    ask = call.request.test_time
    return None if ask is None or ask.failure else ask


def _info(
    call: Call, target: Target, prepared: Prepared, sampling: SamplingParams, echo: Echo | None
) -> AnswerInfo:
    return AnswerInfo(
        request_id=call.caller.identity.request_id,
        model=target.told,
        revision=target.served.revision,
        adapter=target.adapter,
        created_unix_s=int(time.time()),
        service_tier=call.tier.name,
        num_prompt_tokens=len(prepared.token_ids),
        num_choices=sampling.n,
        left_out=prepared.left_out,
        enforcement=prepared.enforcement,
        echo=echo,
    )


async def _let_go(stream: ContinuousStream) -> None:
    """Lets the submission leave: what is left to do is done while the engine works."""
    try:
        # Submissions are written in the next iteration of the event loop.
        await asyncio.sleep(0)
    except BaseException:
        stream.cancel(CancelReason.CLIENT)
        raise
