"""The two generating endpoints: stream or whole, one prompt or several, over the same pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from contract.errors import MillraceError
from gateway.faces.accepted import AcceptedAnswer, first_deltas, write_events
from gateway.faces.bodies import read
from gateway.faces.openai import chat, completions
from gateway.faces.openai.answer_types import UsageBody
from gateway.faces.openai.answers import DONE, AnswerWriter, ChatWriter, CompletionWriter, usage_body
from gateway.faces.openai.errors import error_event
from gateway.faces.openai.fields import FIELDS
from gateway.faces.openai.requests import CommonBody, yielding
from gateway.faces.unserved import WARNING_HEADER
from gateway.http.errors import unexpected
from gateway.http.exchange import Exchange
from gateway.intake.intake import ByteLease, Slices
from gateway.pipeline.delta import ChoiceDelta
from gateway.pipeline.pipeline import Answer, Pipeline
from gateway.types.request import GenerationRequest


class GenerateEndpoints:
    """Handlers of /v1/chat/completions and /v1/completions."""

    def __init__(self, pipeline: Callable[[], Pipeline]) -> None:
        self._pipeline = pipeline

    async def chat(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        pipeline = self._pipeline()
        convert = partial(
            chat.chat_request,
            reasons=pipeline.reasons,
            limits=pipeline.intake.limits,
        )
        body, request = await read(exchange, pipeline.intake, chat.DECODER, convert, chat.TOLERANCE)
        _warn(exchange, body)
        writer = partial(ChatWriter, shows_reasoning=body.include_reasoning is not False)
        await self._answer(exchange, body, [request], writer)

    async def complete(self, exchange: Exchange) -> None:
        """POST /v1/completions."""
        intake = self._pipeline().intake
        convert = partial(completions.completion_requests, limits=intake.limits)
        body, requests = await read(exchange, intake, completions.DECODER, convert, chat.TOLERANCE)
        _warn(exchange, body)
        await self._answer(exchange, body, requests, CompletionWriter)

    async def _answer(
        self,
        exchange: Exchange,
        body: CommonBody,
        requests: Sequence[GenerationRequest],
        kind: Callable[..., AnswerWriter],
    ) -> None:
        pipeline = self._pipeline()
        async with AcceptedAnswer(exchange, pipeline, requests, streams=bool(body.stream)) as answer:
            writers = [
                kind(
                    attempt.info,
                    attempt.reader.texts,
                    tier=attempt.call.tier.openai_name,
                    include_usage=body.include_usage,
                    logprobs=attempt.call.request.sampling.logprobs is not None,
                    first_index=index * attempt.info.num_choices,
                )
                for index, attempt in enumerate(answer.attempts)
            ]
            if body.stream:
                await _stream(exchange, answer, writers, body)
                return
            with pipeline.intake.lease(exchange.verified_caller.identity.tenant) as lease:
                gathered = await _gathered(answer, writers, lease)
                slices, choices = Slices(), []
                for writer, deltas in zip(writers, gathered, strict=True):
                    for choice in writer.choices(deltas):
                        choices.append(choice)
                        await slices.breathe()
                await exchange.respond(200, writers[0].body(choices, _usage(answer, body)))


def _warn(exchange: Exchange, body: CommonBody) -> None:
    for warning in [*FIELDS.check(body), *yielding(body)]:
        exchange.add_headers({WARNING_HEADER: warning})


def _usage(answer: Answer, body: CommonBody) -> UsageBody:
    return usage_body(answer.usages(), timing=bool(body.include_timing))


async def _stream(
    exchange: Exchange, answer: Answer, writers: Sequence[AnswerWriter], body: CommonBody
) -> None:
    # The status can still say what is wrong until the first delta is there.
    source = answer.deltas()
    index, deltas = await first_deltas(exchange, answer, source)
    if body.counts_continuously:
        writers[index].count(_usage(answer, body))
    await exchange.begin_events()
    first = b"".join([each.begin() for each in writers])
    try:
        await write_events(exchange, writers[index].event, deltas, first)
        answer.attempts[index].first_chunk_written()
        async for index, deltas in source:
            answer.attempts[index].first_chunk_written()
            if body.counts_continuously:
                writers[index].count(_usage(answer, body))
            await write_events(exchange, writers[index].event, deltas)
    except MillraceError as error:
        await exchange.end_events(error_event(error))
        raise
    except Exception:
        await exchange.end_events(error_event(unexpected()))
        raise
    end = b"".join([each.rest() for each in writers])
    if body.include_usage:
        end += writers[0].usage_event(_usage(answer, body))
    await exchange.end_events(end + DONE)


async def _gathered(
    answer: Answer, writers: Sequence[AnswerWriter], lease: ByteLease
) -> list[list[ChoiceDelta]]:
    """Everything, in one delta a choice; log-probabilities are kept by the writers, their bytes leased."""
    gathered = [
        [ChoiceDelta(index=index) for index in range(each.info.num_choices)] for each in answer.attempts
    ]
    slices = Slices()
    async for index, deltas in answer.deltas():
        answer.attempts[index].first_chunk_written()
        for delta in deltas:
            for num_bytes in writers[index].keep(delta):
                lease.grow(num_bytes)
                await slices.breathe()
            gathered[index][delta.index].absorb(delta)
    return gathered
