"""The two generating endpoints: stream or whole, one prompt or several, over the same pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from contract.chat import TextPrompt
from contract.errors import MillraceError
from gateway.faces.openai import chat, completions
from gateway.faces.openai.answers import DONE, Answer, ChatAnswer, CompletionAnswer, usage_body
from gateway.faces.openai.fields import WARNING_HEADER, check_unserved
from gateway.faces.openai.large import read
from gateway.faces.openai.requests import CommonBody, yielding
from gateway.http.errors import error_event, unexpected
from gateway.http.exchange import Exchange
from gateway.pipeline.delta import ChoiceDelta
from gateway.pipeline.generation import Generation
from gateway.pipeline.intake import Hold
from gateway.pipeline.pipeline import Pipeline
from gateway.text.detokenizer import decode as decode_ids
from gateway.types.request import GenerationRequest
from gateway.types.slices import Slices

# Deltas whose events are written at once.
_TOGETHER = 32


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
        body, request = await read(exchange, pipeline.intake, chat.DECODER, convert)
        _warn(exchange, body)
        await self._answer(exchange, body, [request], ChatAnswer)

    async def complete(self, exchange: Exchange) -> None:
        """POST /v1/completions."""
        intake = self._pipeline().intake
        convert = partial(completions.completion_requests, limits=intake.limits)
        body, requests = await read(exchange, intake, completions.DECODER, convert)
        _warn(exchange, body)
        await self._answer(exchange, body, requests, CompletionAnswer)

    async def _answer(
        self,
        exchange: Exchange,
        body: CommonBody,
        requests: Sequence[GenerationRequest],
        kind: type[Answer],
    ) -> None:
        pipeline = self._pipeline()
        async with _Accepted(exchange, pipeline, requests) as generations:
            answers = [
                kind(
                    generation.info,
                    generation.reader.vocabulary,
                    include_usage=body.include_usage,
                    logprobs=request.sampling.logprobs is not None,
                    first_index=index * generation.info.num_choices,
                    echo=self._echo(request, generation),
                )
                for index, (request, generation) in enumerate(zip(requests, generations, strict=True))
            ]
            if body.stream:
                await _stream(exchange, generations, answers, body)
                return
            with pipeline.intake.hold(exchange.verified_caller.identity.tenant) as hold:
                gathered = await _gathered(generations, answers, hold)
                slices, choices = Slices(), []
                for answer, deltas in zip(answers, gathered, strict=True):
                    for choice in answer.choices(deltas):
                        choices.append(choice)
                        await slices.breathe()
                await exchange.respond(200, answers[0].body(choices, _usage(generations, body)))

    def _echo(self, request: GenerationRequest, generation: Generation) -> str | None:
        if not request.echo:
            return None
        if isinstance(request.prompt, TextPrompt):
            return request.prompt.text
        return decode_ids(generation.reader.texts, generation.info.prompt_token_ids)


def _warn(exchange: Exchange, body: CommonBody) -> None:
    for warning in [*check_unserved(body), *yielding(body)]:
        exchange.add_headers({WARNING_HEADER: warning})


def _usage(generations: Sequence[Generation], body: CommonBody) -> dict[str, Any]:
    return usage_body([each.usage() for each in generations], timing=bool(body.include_timing))


async def _stream(
    exchange: Exchange, generations: Sequence[Generation], answers: Sequence[Answer], body: CommonBody
) -> None:
    # The status can still say what is wrong until the first delta is there.
    source = _merged(generations)
    index, deltas = await anext(source)
    if body.counts_continuously:
        answers[index].count(_usage(generations, body))
    await exchange.begin_events()
    first = b"".join([each.begin() for each in answers])
    try:
        await _write(exchange, answers[index], deltas, first)
        generations[index].first_chunk_written()
        async for index, deltas in source:
            generations[index].first_chunk_written()
            if body.counts_continuously:
                answers[index].count(_usage(generations, body))
            await _write(exchange, answers[index], deltas)
    except MillraceError as error:
        await exchange.end_events(error_event(error))
        raise
    except Exception:
        await exchange.end_events(error_event(unexpected()))
        raise
    end = b"".join([each.rest() for each in answers])
    if body.include_usage:
        end += answers[0].usage_event(_usage(generations, body))
    await exchange.end_events(end + DONE)


class _Accepted:
    """All requests of one exchange as generations, or none; a client that leaves cancels them."""

    def __init__(self, exchange: Exchange, pipeline: Pipeline, requests: Sequence[GenerationRequest]) -> None:
        self._exchange = exchange
        self._pipeline = pipeline
        self._requests = requests
        self._generations: list[Generation] = []
        # Until they are accepted there is nothing to cancel but the work of accepting them.
        self._accepting: asyncio.Task[Any] | None = asyncio.current_task()

    async def __aenter__(self) -> list[Generation]:
        exchange, pipeline = self._exchange, self._pipeline
        caller = exchange.verified_caller
        exchange.watch_client(self._client_left)
        try:
            for request in self._requests:
                self._generations.append(await pipeline.begin(caller, request))
        except BaseException as error:
            await self._leave(error)
            raise
        self._accepting = None
        exchange.add_headers(pipeline.limiter.headers(caller.identity))
        return self._generations

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave(error)

    async def _leave(self, error: BaseException | None) -> None:
        self._exchange.unwatch()
        try:
            if self._exchange.ended:
                # The answer is on its way: whatever else is ready goes before the books.
                await asyncio.sleep(0)
        finally:
            for generation in reversed(self._generations):
                await generation.close(error)

    def _client_left(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
        else:
            for generation in self._generations:
                generation.cancel()


async def _gathered(
    generations: Sequence[Generation], answers: Sequence[Answer], hold: Hold
) -> list[list[ChoiceDelta]]:
    """Everything, in one delta a choice; log-probabilities are kept by the answers, and count as held."""
    gathered = [[ChoiceDelta(index=index) for index in range(each.info.num_choices)] for each in generations]
    slices = Slices()
    async for index, deltas in _merged(generations):
        generations[index].first_chunk_written()
        for delta in deltas:
            for num_bytes in answers[index].keep(delta):
                hold.grow(num_bytes)
                await slices.breathe()
            gathered[index][delta.index].absorb(delta)
    return gathered


async def _write(
    exchange: Exchange, answer: Answer, deltas: Sequence[ChoiceDelta], first: bytes = b""
) -> None:
    """Writes events, not too many together: a client that was slow has many waiting."""
    while len(deltas) > _TOGETHER:
        await exchange.write(first + b"".join(map(answer.event, deltas[:_TOGETHER])))
        await asyncio.sleep(0)
        deltas, first = deltas[_TOGETHER:], b""
    await exchange.write(first + b"".join(map(answer.event, deltas)))


async def _merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, list[ChoiceDelta]]]:
    """(index, deltas) of all generations as they come; ends when all have ended."""
    if len(generations) == 1:
        while deltas := await generations[0].take():
            yield 0, deltas
        return
    running = {asyncio.ensure_future(each.take()): index for index, each in enumerate(generations)}
    try:
        while running:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = running.pop(task)
                if deltas := task.result():
                    yield index, deltas
                    running[asyncio.ensure_future(generations[index].take())] = index
    finally:
        for task in running:
            task.cancel()
