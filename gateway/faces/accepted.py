"""An answer as long as a face over HTTP writes it, and how its events are written."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any

from contract.grammar import KeywordStatus
from gateway.faces.unserved import WARNING_HEADER, in_header
from gateway.http.exchange import Exchange
from gateway.pipeline.delta import ChoiceDelta
from gateway.pipeline.pipeline import Answer, Pipeline
from gateway.types.request import GenerationRequest
from runtime.loads import LoadState

# How often a stream says that its answer is being chosen.
_KEEP_ALIVE_S = 5.0
# Deltas whose events are written at once.
_TOGETHER = 32
# Characters of a client's own words in a header.
MAX_WARNING = 512


class AcceptedAnswer:
    """The answer to one exchange; a client that leaves cancels it."""

    def __init__(
        self,
        exchange: Exchange,
        pipeline: Pipeline,
        requests: Sequence[GenerationRequest],
        *,
        streams: bool = False,
    ) -> None:
        """One that `streams` begins with comments about how far its model is, where that is being loaded."""
        self._streams = streams
        self._exchange = exchange
        self._pipeline = pipeline
        self._requests = requests
        self._answer: Answer | None = None
        # Seconds that were said to be left of a load: of one that takes longer they stay at the last.
        self._told_left_s = math.inf
        # Until it is accepted there is nothing to cancel but the work of accepting it.
        self._accepting: asyncio.Task[Any] | None = asyncio.current_task()

    async def __aenter__(self) -> Answer:
        exchange, pipeline = self._exchange, self._pipeline
        caller = exchange.verified_caller
        exchange.watch_client(self._client_left)
        try:
            self._answer = await pipeline.answer(
                caller, self._requests, self._tell if self._streams else None
            )
        except BaseException:
            exchange.unwatch()
            raise
        self._accepting = None
        exchange.add_headers(pipeline.limiter.headers(caller.identity))
        for told in (*_left_out(self._answer), *_any_object(self._answer)):
            exchange.add_headers({WARNING_HEADER: told})
        return self._answer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._answer is not None, "what was not entered is not left"
        self._exchange.unwatch()
        try:
            if self._exchange.ended:
                # The answer is on its way: whatever else is ready goes before the books.
                await asyncio.sleep(0)
        finally:
            await self._answer.close(error)

    async def _tell(self, model: str, load: LoadState) -> None:
        """A line that clients of event streams pass over (HTML, server-sent events: comments)."""
        if not self._exchange.begun:
            await self._exchange.begin_events()
        done = f" {load.stage} {load.fraction:.0%}" if load.stage else ""
        left = ""
        if 0 < load.left_s < self._told_left_s:
            self._told_left_s, left = load.left_s, f", about {load.left_s:.0f} s left"
        await self._exchange.write(f": {model} is being loaded{done}{left}\n\n".encode())

    def _client_left(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
        elif self._answer is not None:
            self._answer.cancel()


def _left_out(answer: Answer) -> list[str]:
    """What models have not seen of their prompts, by the prompt where there are several."""
    several = len(answer.attempts) > 1
    return [
        (f"prompt[{index}]: " if several else "") + info.left_out.told(info.num_prompt_tokens)
        for index, info in enumerate(attempt.info for attempt in answer.attempts)
        if info.left_out is not None
    ]


def _any_object(answer: Answer) -> list[str]:
    """The tools of whose schemas nothing is enforced."""
    return [
        in_header(f"{tool_field(attempt.call.request, each)} is not enforced: {each.note}")[:MAX_WARNING]
        for attempt in answer.attempts
        if attempt.info.enforcement is not None
        for each in attempt.info.enforcement.unenforced
        if each.keyword == "parameters"
    ]


def tool_field(request: GenerationRequest, status: KeywordStatus) -> str:
    """The body's field that a report about a part of a tool, as /tools/0/parameters, is about."""
    _, _, index, part = status.path.split("/")
    return request.field(f"tools[{index}].function.{part}")


async def first_deltas(
    exchange: Exchange, answer: Answer, source: AsyncIterator[tuple[int, list[ChoiceDelta]]]
) -> tuple[int, list[ChoiceDelta]]:
    """What a stream begins with. Where an answer is chosen among several first, which takes a while, lines
    that clients pass over say that it is under way: neither they nor a proxy take silence for an end.
    """
    if not any(attempt.call.request.test_time for attempt in answer.attempts):
        return await anext(source)
    first = asyncio.ensure_future(anext(source))
    try:
        while not (await asyncio.wait((first,), timeout=_KEEP_ALIVE_S))[0]:
            await exchange.begin_events()
            await exchange.write(b": samples are under way\n\n")
        return first.result()
    finally:
        first.cancel()


async def write_events(
    exchange: Exchange,
    event: Callable[[ChoiceDelta], bytes],
    deltas: Sequence[ChoiceDelta],
    first: bytes = b"",
) -> None:
    """Writes the events of deltas behind `first`, not too many together: a client that was slow has many
    waiting.
    """
    while len(deltas) > _TOGETHER:
        await exchange.write(first + b"".join(map(event, deltas[:_TOGETHER])))
        await asyncio.sleep(0)
        deltas, first = deltas[_TOGETHER:], b""
    await exchange.write(first + b"".join(map(event, deltas)))
