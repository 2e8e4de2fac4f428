"""Copies of requests for another model: what it would have answered is compared, and thrown away.

A copy begins when the answer that it is compared with has ended; it has the lowest priority, is charged to
nobody, and is dropped where the other model has anything else to do. Nothing waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import msgspec
from opentelemetry.trace import INVALID_SPAN

from contract.chat import JsonSchemaFormat
from contract.errors import MillraceError, Reason
from gateway.config import TierConfig
from gateway.limits.limiter import Charges
from gateway.limits.prices import NANOS_PER_UNIT, Prices
from gateway.models.catalog import Catalog, ServedModel, Target
from gateway.models.routes import share
from gateway.pipeline.attempt import Attempt, Outcome
from gateway.pipeline.attempts import Attempts
from gateway.pipeline.books import COMPLETE, Ended
from gateway.pipeline.call import Call
from gateway.pipeline.delta import SharedTime, Usage
from gateway.pipeline.ports import OpenEntry, Unkept
from gateway.text.detokenizer import TokenTexts, decode
from gateway.tiers import Tier
from observability.emit import names
from observability.emit.metrics import Metrics
from observability.emit.tracing import Telemetry
from runtime.models import ShadowConfig

_log = logging.getLogger(__name__)

# Tenant of all copies in the tokenizer service and in engines. No tenant of a client has such a name.
_TENANT = "(shadow)"
_LOWEST = Tier("(shadow)", TierConfig(priority=-1000, weight=1e-6, admission="best_effort"))


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two answers."""

    served: ServedModel
    texts: TokenTexts
    token_ids: Sequence[int]
    # Whether it ended by itself.
    is_complete: bool
    # Measured from the submission to the engine: the two answers were prepared at different times.
    ttft_s: float | None
    tpot_s: float | None
    usage: Usage


class NoBooks:
    """For attempts that are recorded nowhere."""

    def gap_observer(self, call: Call, target: Target) -> Callable[[float], None]:
        """See AttemptBooks."""
        return lambda _: None

    def open(self, attempt: Attempt, charges: Charges) -> OpenEntry:
        """See AttemptBooks."""
        return Unkept(attempt.call.entry_id)

    def close(self, attempt: Attempt, outcome: Outcome, usage: Usage) -> None:
        """Drops it."""

    def supersede(self, attempt: Attempt) -> None:
        """Drops it."""

    def shared_with(self, attempt: Attempt) -> tuple[SharedTime, ...]:
        """Nobody asks."""
        return ()


class Shadows:
    """Chooses what is copied, and compares. All in the background of one event loop."""

    def __init__(
        self, catalog: Catalog, attempts: Attempts, prices: Prices, metrics: Metrics, telemetry: Telemetry
    ) -> None:
        self._catalog = catalog
        self._attempts = attempts
        self._prices = prices
        self._metrics = metrics
        self._telemetry = telemetry
        self._running: set[asyncio.Task[None]] = set()
        # By name that was asked for.
        self._num_running: Counter[str] = Counter()

    def wants(self, attempt: Attempt) -> bool:
        """Whether the answer's tokens are to be kept for a comparison."""
        call, target = attempt.call, attempt.target
        config = self._config(call)
        if config is None or target.adapter or target.served.name == config.model:
            return False
        sampling = call.request.sampling
        _, num_sequences = call.request.branches
        chosen = share(f"shadow\0{call.request.model}", call.caller.identity.request_id) < config.share
        return num_sequences == 1 and sampling.max_tokens != 0 and chosen

    def offer(self, end: Ended) -> None:
        """Takes a request that has ended, if its tokens were kept."""
        config = self._config(end.call)
        if config is None or end.outcome.is_failure:
            return
        name = end.call.request.model
        served = self._catalog.served.get(config.model)
        if served is None or self._num_running[name] >= config.max_concurrent or self._is_busy(served):
            self._count(name, config.model, "dropped")
            return
        self._num_running[name] += 1
        task = asyncio.create_task(self._run(end, config, served), name="shadow")
        self._running.add(task)
        task.add_done_callback(lambda done: self._ended(name, done))

    async def close(self) -> None:
        """Ends all copies."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _config(self, call: Call) -> ShadowConfig | None:
        shadows = self._catalog.models.shadows
        return shadows.get(call.request.model) if shadows else None

    def _is_busy(self, served: ServedModel) -> bool:
        engines = self._attempts.fleet.of(served.key)
        return not engines or all(each.load.num_waiting > 0 for each in engines)

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._num_running[name] -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a shadow's comparison has failed", exc_info=error)

    def _count(self, name: str, shadow: str, outcome: str) -> None:
        self._metrics.add(names.SHADOW_REQUESTS, model=name, shadow=shadow, outcome=outcome)

    async def _run(self, end: Ended, config: ShadowConfig, served: ServedModel) -> None:
        name = end.call.request.model
        try:
            async with asyncio.timeout(config.timeout_s):
                live = _answered(end.attempt, end.outcome.name in COMPLETE)
                await self._compare(end, config.model, live, await self._answer(end.attempt, served))
        except TimeoutError:
            self._count(name, config.model, "late")
        except MillraceError as error:
            _log.info("a shadow of model %s has failed: %s", config.model, error.message)
            self._count(name, config.model, "failed")
            if error.reason is not Reason.QUEUE_LIMIT_EXCEEDED:
                # An engine that has no room for a copy says nothing of its answers.
                self._prefer("live", name, config.model)

    def _copy(self, call: Call) -> Call:
        """The same request, asked by nobody."""
        identity = call.caller.identity
        nobody = msgspec.structs.replace(identity, tenant=_TENANT, key_id=_TENANT, allowed_models=())
        # Its deadline was the answer's.
        caller = msgspec.structs.replace(
            call.caller, identity=nobody, received_s=time.monotonic(), deadline_s=None, context=None
        )
        request = call.request
        sampling = msgspec.structs.replace(request.sampling, logprobs=None)
        request = msgspec.structs.replace(request, sampling=sampling)
        return Call(caller, request, _LOWEST, INVALID_SPAN, self._telemetry)

    async def _answer(self, live: Attempt, served: ServedModel) -> Answered:
        attempt = await self._attempts.open(
            self._copy(live.call),
            Target(served=served, told=served.name),
            NoBooks(),
            is_limited=False,
            # Both models draw by the same random numbers, so that answers differ by the models alone.
            seed=live.stream.seed,
        )
        async with attempt:
            attempt.kept_ids, reason = [], None
            while deltas := await attempt.drain():
                reason = deltas[-1].finish_reason
        return _answered(attempt, reason is not None and reason.name.lower() in COMPLETE)

    async def _compare(self, end: Ended, shadow: str, live: Answered, copied: Answered) -> None:
        name = end.call.request.model
        agreement = _agreement(live, copied)
        labels: Any = {"model": name, "shadow": shadow}
        self._count(name, shadow, "same" if math.isclose(agreement, 1.0) else "different")
        self._metrics.observe(names.SHADOW_AGREEMENT, agreement, **labels)
        form, valid = end.call.request.response_format, dict[str, bool]()
        for side, answer in (("live", live), ("shadow", copied)):
            if answer.ttft_s is not None:
                self._metrics.observe(names.SHADOW_TTFT, answer.ttft_s, side=side, **labels)
            if answer.tpot_s is not None:
                self._metrics.observe(names.SHADOW_TPOT, answer.tpot_s, side=side, **labels)
            cost = self._prices.cost_nanos(
                answer.served.name,
                prompt_tokens=answer.usage.prompt_tokens,
                cached_prompt_tokens=answer.usage.cached_prompt_tokens,
                billed_tokens=len(answer.token_ids),
            )
            self._metrics.add(names.SHADOW_COST, cost / NANOS_PER_UNIT, side=side, **labels)
            if form is not None:
                valid[side] = await self._is_valid(end.call, form, answer)
                told = str(valid[side]).lower()
                self._metrics.add(names.SHADOW_OUTPUTS, side=side, valid=told, **labels)
        better = [side for side, is_valid in valid.items() if is_valid]
        self._prefer(better[0] if len(better) == 1 else "neither", name, shadow)

    def _prefer(self, better: str, name: str, shadow: str) -> None:
        self._metrics.add(names.SHADOW_PAIRS, model=name, shadow=shadow, better=better)

    async def _is_valid(self, call: Call, form: Any, answer: Answered) -> bool:
        if not answer.is_complete or not isinstance(form, JsonSchemaFormat):
            return answer.is_complete
        copy, text, key = self._copy(call), _text(answer), answer.served.key
        context = self._attempts.callers.sign(copy.caller, _LOWEST, ("", ""), key)
        verdict = await self._attempts.tokenizer.validate(key, form.schema_json, text, context=context)
        return verdict.valid


def _answered(attempt: Attempt, is_complete: bool) -> Answered:
    return Answered(
        served=attempt.target.served,
        texts=attempt.reader.texts,
        token_ids=attempt.kept_ids or [],
        is_complete=is_complete,
        ttft_s=attempt.meter.engine_ttft_s,
        tpot_s=attempt.meter.tpot_s(attempt.info.num_choices),
        usage=attempt.usage(),
    )


def _agreement(live: Answered, copied: Answered) -> float:
    """Share of the longer answer up to the first difference: in tokens, or in characters where the models
    have different vocabularies.
    """
    if live.served.vocabulary.fingerprint == copied.served.vocabulary.fingerprint:
        ends = {*live.served.vocabulary.eos_token_ids, *copied.served.vocabulary.eos_token_ids}
        one, other = ([each for each in side.token_ids if each not in ends] for side in (live, copied))
        return _common(one, other)
    return _common(_text(live), _text(copied))


def _common(one: Sequence[object], other: Sequence[object]) -> float:
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    longest = max(len(one), len(other))
    return sum(1 for _ in equal) / longest if longest else 1.0


def _text(answer: Answered) -> str:
    return decode(answer.texts, answer.token_ids)
