"""Makes the streams of requests that think longer, of what the gateway has: models, tokenizer, traces."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from contract.errors import MillraceError, invalid
from contract.grammar import Verdict
from contract.sampling import SamplingParams
from gateway.engines.continuation import ContinuousStream
from gateway.engines.fleet import Fleet
from gateway.engines.types import Submission
from gateway.models.catalog import ServedModel
from gateway.pipeline.attempts import Attempts
from gateway.pipeline.call import Call
from gateway.pipeline.delta import AnswerReader
from gateway.pipeline.pipeline import Pipeline, has_ids
from gateway.pipeline.pooled import check_task
from gateway.pipeline.pooled_answers import pooled_answer
from gateway.pipeline.pooled_requests import PooledForm, scored_request, scores_of
from gateway.test_time import admission, ballots
from gateway.test_time.asked import Begin, within
from gateway.test_time.branch import AnswerPart
from gateway.test_time.chains import CritiqueRevise, Escalate, questions_of
from gateway.test_time.confidence import TOP
from gateway.test_time.scorers import (
    AnswerScorer,
    CheckScorer,
    ModelScorer,
    SchemaScorer,
    question_of,
    unanswered,
)
from gateway.test_time.search import StepSearch
from gateway.test_time.strategies import BestSample, DeepConf, RatedVotes, SelfConsistency, Strategy
from gateway.test_time.stream import DeliberateStream, Plan
from gateway.test_time.verifier import VerifierScorer
from gateway.tiers import Tier
from gateway.types.deliberation import Deliberated, Deliberation
from gateway.types.request import GenerationRequest, Prepared
from observability.emit import names
from observability.emit.tracing import Telemetry

_SCORER = "test_time.scorer"
# For checks that come before there are answers.
_ANY_PAIR = ("question", "answer")
_VOTES, _RATES = ("self_consistency", "deepconf"), ("best_of", "escalate", "search")


def strategy_of(ask: Deliberation, scorer: AnswerScorer | None) -> Strategy:
    """A strategy that nothing has happened to."""
    number, rates = ask.num_samples, scorer is not None
    confidence = ask.confidence or admission.DEFAULT_CONFIDENCE
    enough = None if scorer is None else scorer.enough
    make: Mapping[str, Callable[[], Strategy]] = {
        "best_of": lambda: BestSample(number, rates=rates, enough=math.inf if enough is None else enough),
        "self_consistency": lambda: RatedVotes(number) if rates else SelfConsistency(number, confidence),
        "deepconf": lambda: DeepConf(number, confidence),
        "escalate": lambda: Escalate(ask.confidence or admission.DEFAULT_BELIEF, rates=rates),
        "critique_revise": lambda: CritiqueRevise(ask.samples or 1),
        "search": lambda: StepSearch(number, rates=rates),
    }
    return make[ask.strategy]()


def _plainly(ask: Deliberation) -> Deliberated:
    """What is told of a request that has the plain answer instead."""
    return Deliberated(
        strategy=ask.strategy,
        ended_by="failure",
        max_samples=1,
        samples=[],
        completion_tokens=0,
        failure=ask.failure,
    )


def _on_behalf(call: Call, model: str) -> dict[str, Any]:
    """What requests to a model that scores take over from the one that they are made for."""
    return {
        "model": model,
        "service_tier": call.request.service_tier,
        "metadata": call.request.metadata,
        "face": call.request.face,
        "field_names": {"model": f"{_SCORER}.model"},
    }


def _form(call: Call, model: str) -> PooledForm:
    """What a model that scores is asked on behalf of a call."""
    return PooledForm(**_on_behalf(call, model))


def _asking(call: Call, model: str) -> GenerationRequest:
    """What a model that chats is asked on behalf of a call."""
    return GenerationRequest(prompt=call.request.prompt, **_on_behalf(call, model))


class Deliberations:
    """What attempts ask of this room."""

    def __init__(self, attempts: Attempts, telemetry: Telemetry) -> None:
        self._attempts = attempts
        self._telemetry = telemetry
        # Answers requests to models that score; set where it is built.
        self.pipeline: Pipeline | None = None

    def admitted(self, request: GenerationRequest, tier: Tier) -> GenerationRequest:
        """The request with what its tier lets it have; raises what `admission` does."""
        ask = request.test_time
        assert ask is not None, "it thinks longer"
        admission.checked(request, ask)
        try:
            allowed = admission.within_tier(request, ask, tier)
        except MillraceError as error:
            allowed = admission.failed(ask, error)
        return replace(request, test_time=allowed)

    async def of_a_sample(
        self, call: Call, served: ServedModel, sampling: SamplingParams, context: Any
    ) -> SamplingParams:
        """The options of each sample of a call, which may have the plain answer from now on."""
        ask = call.request.test_time
        if ask is None or ask.failure:
            return sampling
        may_fail = [call.request.field(f"test_time.{name}") for name in ("budget_tokens", "model", "scorer")]
        try:
            self._check_model(call, ask)
            self._check_judge(call, ask)
            await self._check_schema(call, ask, served, context)
            return admission.of_a_sample(call.request, ask, sampling)
        except MillraceError as error:
            if error.field not in may_fail:
                raise
            call.request = replace(call.request, test_time=admission.failed(ask, error))
            return sampling

    def _check_model(self, call: Call, ask: Deliberation) -> None:
        """Raises for a larger model that the caller may not use, or that cannot take the request over."""
        if ask.strategy != "escalate":
            return
        assert self.pipeline is not None, "as whoever builds it sets"
        request, identity, catalog = call.request, call.caller.identity, self.pipeline.catalog
        field = request.field("test_time.model")
        try:
            target = catalog.resolve(identity, ask.model, tier=call.tier.name)
        except MillraceError as error:
            raise MillraceError(error.reason, f"{field}: {error.message}", field=field) from error
        vocabulary = target.served.vocabulary
        first = catalog.any_of(request.model)
        if vocabulary.pooled is not None:
            raise invalid(field, f"{ask.model!r} generates nothing; name a model that does")
        if first is not None and has_ids(request) and first.vocabulary.fingerprint != vocabulary.fingerprint:
            problem = "it has another vocabulary, in which the request's token ids mean others"
            raise invalid(field, f"{problem}; leave logit_bias and other options of ids out")

    def _check_judge(self, call: Call, ask: Deliberation) -> None:
        """Raises for a model that is to score and cannot, or that the caller may not use: before the samples
        are paid for, of which perhaps none comes to be scored.
        """
        spec = ask.scorer
        if spec is None or not spec.model:
            return
        assert self.pipeline is not None, "as whoever builds it sets"
        try:
            served = self.pipeline.model(call.caller, spec.model)
            if spec.type == "verifier":
                asking = _asking(call, spec.model)
            else:
                asking = scored_request(_form(call, spec.model), served, [_ANY_PAIR], (_SCORER, _SCORER))
            check_task(asking, served)
        except MillraceError as error:
            raise unanswered(ask, call.request.field(_SCORER), error) from error

    async def _check_schema(self, call: Call, ask: Deliberation, served: ServedModel, context: Any) -> None:
        """Raises for a schema that cannot be compiled, which also is compiled from now on."""
        spec = ask.scorer
        if spec is None or not spec.schema_json:
            return
        try:
            await self._attempts.tokenizer.validate(served.key, spec.schema_json, "null", context=context)
        except MillraceError as error:
            if error.mapping.http_status == 500 or error.retry_after_s is not None:
                raise unanswered(ask, call.request.field(_SCORER), error) from error
            field = f"{call.request.field(_SCORER)}.schema"
            raise MillraceError(error.reason, f"{field}: {error.message}", field=field) from error

    def most_tokens(self, ask: Deliberation, sampling: SamplingParams) -> int:
        """See `admission.own_tokens`."""
        return admission.own_tokens(ask, sampling)

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
        """The stream of a call; the last three are those of ContinuousStream."""
        ask = call.request.test_time
        assert ask is not None, "it thinks longer"
        if ask.failure:
            plain = ContinuousStream(fleet, submission, **options)
            plain.deliberated = _plainly(ask)
            return plain
        scorer, request, spec = self._scorer(call, submission), call.request, ask.scorer
        top, sampling = TOP if ask.strategy == "deepconf" else 0, submission.sampling
        pattern = None if spec is None else ballots.compiled(spec, request.field(_SCORER))
        if ask.is_chain and budget_tokens == admission.own_tokens(ask, sampling):
            # What is asked beside it reserves what it takes.
            budget_tokens = admission.most_tokens(ask, sampling)
        plan = Plan(
            ask=ask,
            strategy=strategy_of(ask, scorer),
            scorer=scorer,
            ballot=spec if ask.strategy in _VOTES else None,
            pattern=pattern,
            budget_tokens=budget_tokens,
            model=request.model,
            logprobs=request.sampling.logprobs,
            scorer_field=request.field(_SCORER),
            choice=lambda: reader.choices(request, prepared, call.caller.identity.request_id, 1)[0],
            note=partial(self._note, call),
            left_s=call.caller.remaining_s(),
            **self._of_chain(call, ask, sampling.max_tokens, pattern),
        )
        return DeliberateStream(fleet, replace(submission, confidence_top=top), plan=plan, **options)

    def _of_chain(self, call: Call, ask: Deliberation, max_tokens: int, pattern: Any) -> dict[str, Any]:
        """What a plan has more whose parts follow each other."""
        if not ask.is_chain:
            return {}
        question = questions_of(call.request, ask, max_tokens, pattern)
        return {"question": question, "begin": self._begin(call)}

    def _begin(self, call: Call) -> Begin:
        """Asks on behalf of a call."""
        pipeline = self.pipeline
        assert pipeline is not None, "as whoever builds it sets"
        return lambda request: pipeline.begin(within(call), request)

    def _scorer(self, call: Call, submission: Submission) -> AnswerScorer | None:
        request = call.request
        ask = request.test_time
        spec = None if ask is None else ask.scorer
        if ask is None or spec is None or not (ask.strategy in _RATES or spec.model):
            return None
        match "model" if ask.strategy in _VOTES else spec.type:
            case "likelihood":
                return None
            case "schema":

                async def validate(text: str) -> Verdict:
                    return await self._attempts.tokenizer.validate(
                        submission.model, spec.schema_json, text, context=submission.context
                    )

                return SchemaScorer(validate)
            case "model":

                async def score(pairs: list[tuple[str, str]]) -> tuple[list[float], int]:
                    return await self._score(call, spec.model, pairs)

                return ModelScorer(question_of(request.prompt), score)
            case "verifier":
                asking = _asking(call, spec.model)
                return VerifierScorer(question_of(request.prompt), spec, asking, self._begin(call))
            case _:
                return CheckScorer(spec, ballots.compiled(spec, request.field(_SCORER)))

    async def _score(
        self, call: Call, model: str, pairs: Sequence[tuple[str, str]]
    ) -> tuple[list[float], int]:
        """What a served model scores pairs with, and the tokens that it has read for it."""
        assert self.pipeline is not None, "as whoever builds it sets"
        # A row of its own in the ledger, because a model has prices of its own.
        caller = within(call)
        served = self.pipeline.model(caller, model)
        request = scored_request(_form(call, model), served, pairs, (_SCORER, _SCORER))
        answer = await pooled_answer(self.pipeline, caller, request)
        return scores_of(answer.outputs, pairs), answer.prompt_tokens

    def _note(self, call: Call, branch: AnswerPart) -> None:
        # What a step goes on from has ended before it.
        before = None if branch.parent is None else branch.parent.span
        branch.span = self._telemetry.record(
            names.GATEWAY_SAMPLE,
            parent=call.span if before is None else before,
            start_s=branch.started_s,
            end_s=branch.ended_s,
            attributes={
                names.CHOICE_INDEX: branch.index,
                names.OUTPUT_TOKENS: branch.num_tokens,
                names.ENGINE_ID: branch.engine,
                names.OUTCOME: "stopped" if branch.finish is None else branch.finish.name.lower(),
            },
        )
