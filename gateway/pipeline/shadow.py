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
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import msgspec

from contract.chat import JsonSchemaFormat
from contract.engines import CancelReason
from contract.errors import MillraceError
from contract.outputs import FinishReason
from gateway.auth.verifier import CallerVerifier
from gateway.config import TierConfig
from gateway.engines.continuation import ContinuousStream
from gateway.engines.fleet import Fleet
from gateway.engines.types import Submission
from gateway.limits.prices import NANOS_PER_UNIT, Prices
from gateway.models.catalog import Catalog, ServedModel
from gateway.models.routes import share
from gateway.pipeline.call import Call
from gateway.pipeline.defaults import complete, completion_limit, token_limit
from gateway.pipeline.generation import Generation
from gateway.pipeline.outcome import Ended
from gateway.pipeline.reading import AnswerReader
from gateway.text.detokenizer import decode
from gateway.tiers import Tier
from gateway.tokenizer.client import TokenizerClient
from gateway.types.caller import Caller
from observability.emit import names
from observability.emit.metrics import Metrics
from runtime.models import ShadowConfig

_log = logging.getLogger(__name__)

# Whose turn a copy takes, in the tokenizer service and in engines. No tenant has such a name.
_TENANT = "(shadow)"
_LOWEST = Tier("(shadow)", TierConfig(priority=-1000, weight=1e-6, admission="best_effort"))


class Answered(msgspec.Struct, kw_only=True):
    """One of the two answers."""

    served: ServedModel
    token_ids: list[int] = []
    # Whether it ended by itself.
    is_complete: bool = False
    ttft_s: float | None = None
    tpot_s: float | None = None
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0


class Shadows:
    """Chooses what is copied, and compares. All in the background of one event loop."""

    def __init__(
        self,
        catalog: Catalog,
        tokenizer: TokenizerClient,
        callers: CallerVerifier,
        prices: Prices,
        metrics: Metrics,
    ) -> None:
        self._catalog = catalog
        self._fleet: Fleet = catalog.fleet
        self._tokenizer = tokenizer
        self._callers = callers
        self._prices = prices
        self._metrics = metrics
        self._running: set[asyncio.Task[None]] = set()
        # By name that was asked for.
        self._num_running: Counter[str] = Counter()

    def wants(self, call: Call) -> bool:
        """Whether the answer's tokens are to be kept for a comparison."""
        config = self._config(call)
        if config is None or call.target.adapter or call.target.served.name == config.model:
            return False
        sampling = call.request.sampling
        _, num_sequences = sampling.branches
        chosen = share(f"shadow\0{call.request.model}", call.caller.identity.request_id) < config.share
        return num_sequences == 1 and sampling.max_tokens != 0 and chosen

    def offer(self, end: Ended) -> None:
        """Takes a request that has ended, if its tokens were kept."""
        config, generation = self._config(end.call), end.generation
        if config is None or generation.kept_ids is None or end.outcome.is_failure:
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
        engines = self._fleet.of(served.key)
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
                copied = await self._answer(end, served)
                await self._compare(end, config.model, _answered(end.call, end.generation, end), copied)
        except TimeoutError:
            self._count(name, config.model, "late")
        except MillraceError as error:
            _log.info("a shadow of model %s has failed: %s", config.model, error.message)
            self._count(name, config.model, "failed")

    def _context(self, call: Call, served: ServedModel) -> tuple[Caller, Any]:
        identity = call.caller.identity
        nobody = msgspec.structs.replace(identity, tenant=_TENANT, key_id=_TENANT, allowed_models=())
        # Its deadline was the answer's.
        caller = msgspec.structs.replace(call.caller, identity=nobody, deadline_s=None, context=None)
        return caller, self._callers.sign(caller, _LOWEST, ("", ""), served.key)

    async def _answer(self, end: Ended, served: ServedModel) -> Answered:
        call = end.call
        request, (caller, context) = call.request, self._context(call, served)
        prepared = await self._tokenizer.prepare(
            model=served.key,
            prompt=request.prompt,
            response_format=request.response_format,
            context=context,
            tenant=_TENANT,
        )
        reader = AnswerReader(served)
        num_prompt_tokens = len(prepared.token_ids)
        limit = token_limit(self._fleet.max_model_len(served.key), served.config.max_context_tokens or None)
        sampling = complete(
            request.sampling,
            checkpoint={**reader.checkpoint, **served.config.defaults},
            max_tokens=completion_limit(request, num_prompt_tokens, limit),
            eos_token_ids=served.vocabulary.eos_token_ids,
        )
        stream = ContinuousStream(
            self._fleet,
            Submission(
                context=context,
                prompt_token_ids=prepared.token_ids,
                # What was drawn is drawn by the same numbers.
                sampling=msgspec.structs.replace(sampling, seed=end.generation.stream.seed, logprobs=None),
                grammar=prepared.grammar,
                request_id=caller.identity.request_id,
                cache_salt=caller.identity.cache_salt,
                model=served.key,
                checkpoint=served.config.path,
            ),
        )
        return await _taken(stream, served, num_prompt_tokens)

    async def _compare(self, end: Ended, shadow: str, live: Answered, copied: Answered) -> None:
        name = end.call.request.model
        agreement = _agreement(live, copied)
        labels: Any = {"model": name, "shadow": shadow}
        self._count(name, shadow, "same" if math.isclose(agreement, 1.0) else "different")
        self._metrics.observe(names.SHADOW_AGREEMENT, agreement, **labels)
        form = end.call.request.response_format
        for side, answer in (("live", live), ("shadow", copied)):
            if answer.ttft_s is not None:
                self._metrics.observe(names.SHADOW_TTFT, answer.ttft_s, side=side, **labels)
            if answer.tpot_s is not None:
                self._metrics.observe(names.SHADOW_TPOT, answer.tpot_s, side=side, **labels)
            cost = self._prices.cost_nanos(
                answer.served.name,
                prompt_tokens=answer.prompt_tokens,
                cached_prompt_tokens=answer.cached_prompt_tokens,
                completion_tokens=len(answer.token_ids),
            )
            self._metrics.add(names.SHADOW_COST, cost / NANOS_PER_UNIT, side=side, **labels)
            if form is not None:
                is_valid = await self._is_valid(end.call, form, answer)
                self._metrics.add(names.SHADOW_OUTPUTS, side=side, valid=str(is_valid).lower(), **labels)

    async def _is_valid(self, call: Call, form: Any, answer: Answered) -> bool:
        if not answer.is_complete or not isinstance(form, JsonSchemaFormat):
            return answer.is_complete
        _, context = self._context(call, answer.served)
        text, key = _text(answer), answer.served.key
        verdict = await self._tokenizer.validate(key, form.schema_json, text, context=context)
        return verdict.valid


async def _taken(stream: ContinuousStream, served: ServedModel, num_prompt_tokens: int) -> Answered:
    answer = Answered(served=served, prompt_tokens=num_prompt_tokens)
    began_s = time.monotonic()
    first_s = last_s = 0.0
    stream.start()
    try:
        while True:
            for output in await stream.take():
                last_s = time.monotonic()
                first_s = first_s or last_s
                answer.token_ids += output.token_ids
                if output.first_token is not None:
                    answer.cached_prompt_tokens = output.first_token.cached_prompt_tokens
                if output.finish_reason is None:
                    continue
                answer.is_complete = output.finish_reason is FinishReason.STOP
                answer.ttft_s = first_s - began_s
                if len(answer.token_ids) > 1:
                    answer.tpot_s = (last_s - first_s) / (len(answer.token_ids) - 1)
                return answer
    finally:
        stream.cancel(CancelReason.CLIENT)


def _answered(call: Call, generation: Generation, end: Ended) -> Answered:
    return Answered(
        served=call.target.served,
        token_ids=generation.kept_ids or [],
        is_complete=end.outcome.name in ("stop", "tool_calls"),
        # As the copy's: without what lies before the engine.
        ttft_s=generation.meter.engine_ttft_s,
        tpot_s=end.tpot_s,
        prompt_tokens=end.usage.prompt_tokens,
        cached_prompt_tokens=end.usage.cached_prompt_tokens,
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
    return decode(AnswerReader(answer.served).texts, answer.token_ids)
