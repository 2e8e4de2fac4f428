"""Clients that ask the same greedy questions again and again, and what they saw while processes died."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import msgspec

from benchmarks.stack import RunningStack

CONFIG = """
[supervisor]
restart_delay_s = 0.2
max_restart_delay_s = 1.0
[engine.simulation]
step_ms = 50.0
"""


@dataclass(frozen=True)
class Answer:
    """What a client has read of one stream."""

    text: str
    finish_reason: str | None
    completion_tokens: int
    # Log-probability of every token. Another order of additions may change their last digits.
    logprobs: tuple[float, ...] = field(default=(), compare=False)
    # How the stream failed; "" for a whole one.
    error: str = ""
    first_s: float = field(default=0.0, compare=False)


@dataclass
class Observed:
    """What all clients saw while engines died. Times are seconds."""

    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    gaps_s: list[float] = field(default_factory=list)
    # From a request to its first chunk.
    first_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    largest_logprob_change: float = 0.0

    def note(self, answer: Answer, expected: Answer) -> None:
        """One more stream has ended."""
        # Of a stream that was lost, by its chunks.
        self.num_tokens += answer.completion_tokens or len(answer.logprobs)
        self.first_s.append(answer.first_s)
        if answer.error:
            # A stream that never began was refused; one that began was lost.
            self.outcomes["lost" if answer.text else "refused"] += 1
            self.errors[answer.error[:200]] += 1
        else:
            whole = len(answer.logprobs) == answer.completion_tokens
            self.outcomes["identical" if whole and answer == expected else "different"] += 1
            for mine, theirs in zip(answer.logprobs, expected.logprobs, strict=False):
                self.largest_logprob_change = max(self.largest_logprob_change, abs(mine - theirs))


class Clients:
    """`num` clients, each with a question of its own."""

    def __init__(self, stack: RunningStack, num: int, num_tokens: int, *, filler: str = "") -> None:
        self.num = num
        self._filler = filler
        self._num_tokens = num_tokens
        state = stack.state
        self._model = state.model
        self._http = httpx.AsyncClient(
            base_url=stack.url,
            headers={"authorization": f"Bearer {state.api_key}"},
            timeout=120,
            limits=httpx.Limits(max_connections=num),
            trust_env=False,
        )

    async def ask(self, number: int, gaps_s: list[float]) -> Answer:
        """One stream from its request to its end; adds the times between its chunks to `gaps_s`."""
        body = {
            "model": self._model,
            "messages": [
                {"role": "user", "content": f"Tell me story number {number}, please.{self._filler}"}
            ],
            "temperature": 0,
            # Simulated tokens depend on it; greedy ones of a model do not.
            "seed": number,
            "max_tokens": self._num_tokens,
            "ignore_eos": True,
            # A chunk for every token, also for those without text.
            "logprobs": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text, reason, tokens = "", None, 0
        logprobs: list[float] = []
        begin_s = time.perf_counter()
        first_s = last_s = 0.0
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if response.status_code != 200:
                        return Answer(text, reason, tokens, error=line)
                    if not line.startswith("data: {"):
                        continue
                    now_s = time.perf_counter()
                    if last_s:
                        gaps_s.append(now_s - last_s)
                    first_s = first_s or now_s - begin_s
                    last_s = now_s
                    event = msgspec.json.decode(line[6:])
                    if "error" in event:
                        return Answer(text, reason, tokens, tuple(logprobs), str(event["error"]), first_s)
                    for choice in event["choices"]:
                        logprobs += [
                            each["logprob"] for each in (choice["logprobs"] or {}).get("content", ())
                        ]
                        text += choice["delta"].get("content") or ""
                        reason = choice["finish_reason"] or reason
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        except httpx.HTTPError as error:
            if last_s:
                # It has waited for a chunk, and hears that none comes.
                gaps_s.append(time.perf_counter() - last_s)
            return Answer(text, reason, tokens, tuple(logprobs), repr(error), first_s)
        return Answer(text, reason, tokens, tuple(logprobs), first_s=first_s)

    async def ask_all(self) -> list[Answer]:
        """Every question once, all at a time."""
        return await asyncio.gather(*(self.ask(number, []) for number in range(self.num)))

    async def ask_until(self, end_s: float, expected: Sequence[Answer], observed: Observed) -> None:
        """Every question again and again; what has begun by `end_s` is read to its end."""

        async def repeat(number: int) -> None:
            while time.monotonic() < end_s:
                observed.note(await self.ask(number, observed.gaps_s), expected[number])

        await asyncio.gather(*(repeat(number) for number in range(self.num)))

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()
