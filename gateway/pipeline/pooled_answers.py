"""The outputs of all texts of one request to a model that pools: all, or the first error."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from contract.chat import LeftOut
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.pooled import PooledAttempt
from gateway.types.request import Caller, GenerationRequest


class Pooled(NamedTuple):
    """What became of one text."""

    # Little-endian float32.
    packed: bytes
    prompt_tokens: int
    left_out: LeftOut | None = None

    @property
    def values(self) -> list[float]:
        """The numbers."""
        return list(struct.unpack(f"<{len(self.packed) // 4}f", self.packed))


class PooledAnswer(NamedTuple):
    """What became of a request, in the order of its texts."""

    outputs: Sequence[Pooled]
    prompt_tokens: int
    request_id: str
    # The model that answered.
    model: str
    created_unix_s: int


async def pooled_answer(pipeline: Pipeline, caller: Caller, request: GenerationRequest) -> PooledAnswer:
    """The answer; raises the first refusal or failure, and what is left is taken back then."""
    async with await pipeline.begin(caller, request) as attempt:
        assert isinstance(attempt, PooledAttempt), "as its request pools"
        while await attempt.drain():
            attempt.first_chunk_written()
        info, outputs = attempt.info, attempt.outputs
        return PooledAnswer(
            outputs=[
                Pooled(
                    outputs[index],
                    text.num_tokens,
                    LeftOut(num_tokens=text.num_left_out) if text.num_left_out else None,
                )
                for index, text in enumerate(attempt.texts)
            ],
            prompt_tokens=attempt.usage().prompt_tokens,
            request_id=info.request_id,
            model=info.model,
            created_unix_s=info.created_unix_s,
        )
