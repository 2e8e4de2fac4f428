"""Many texts of one request, each an attempt of its own: begun a few at a time, and all answered or none."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import NamedTuple

from contract.chat import LeftOut
from gateway.pipeline.pipeline import Pipeline
from gateway.types.request import Caller, GenerationRequest

# Texts of one request that are under way at a time: enough to fill an engine's steps, and no more than
# others can wait
# behind.
TOGETHER = 64


class Pooled(NamedTuple):
    """What became of one text."""

    # Little-endian float32.
    packed: bytes
    prompt_tokens: int
    cached_tokens: int
    left_out: LeftOut | None
    # Of the text's request, and the model that answered.
    request_id: str
    model: str
    created_unix_s: int

    @property
    def values(self) -> list[float]:
        """The numbers."""
        return list(struct.unpack(f"<{len(self.packed) // 4}f", self.packed))


async def pooled_answers(
    pipeline: Pipeline, caller: Caller, requests: Sequence[GenerationRequest]
) -> list[Pooled]:
    """The outputs, in the order of the requests. Raises the first refusal or failure; the others are ended
    then.
    """
    found: dict[int, Pooled] = {}
    left = iter(enumerate(requests))

    async def work() -> None:
        for index, request in left:
            found[index] = await _one(pipeline, caller, request)

    tasks = [asyncio.create_task(work(), name="pool") for _ in range(min(TOGETHER, len(requests)))]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return [found[index] for index in range(len(requests))]


async def _one(pipeline: Pipeline, caller: Caller, request: GenerationRequest) -> Pooled:
    async with await pipeline.begin(caller, request) as attempt:
        while await attempt.drain():
            attempt.first_chunk_written()
        usage, info = attempt.usage(), attempt.info
        return Pooled(
            packed=attempt.pooled,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_prompt_tokens,
            left_out=info.left_out,
            request_id=info.request_id,
            model=info.model,
            created_unix_s=info.created_unix_s,
        )
