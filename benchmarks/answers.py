"""Clients that ask the same greedy questions again and again, and keep what they read while processes died.

`services.bench` measures how fast answers come and throws them away; here they are compared: with those of an
undisturbed run, and with the ledger. So all gates that kill or stop processes ask by these clients.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from benchmarks.stack import RunningStack

# A client asks for the rest of its answer so often, and no longer after the last of it that came.
RETRY_S = 0.1
PATIENCE_S = 20.0


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
    # By which the ledger has it; the last one's, where several streams were needed.
    request_id: str = field(default="", compare=False)


@dataclass
class Reading:
    """An answer as it comes, in one stream or several."""

    gaps_s: list[float]
    begin_s: float = field(default_factory=time.perf_counter)
    text: str = ""
    reason: str | None = None
    completion_tokens: int = 0
    # Of streams that were cut.
    tokens_before: int = 0
    logprobs: list[float] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0
    request_id: str = ""

    def chunk(self, event: dict[str, Any]) -> None:
        """One more event of a stream."""
        now_s = time.perf_counter()
        if self.last_s:
            self.gaps_s.append(now_s - self.last_s)
        self.first_s = self.first_s or now_s - self.begin_s
        self.last_s = now_s
        for choice in event["choices"]:
            self.logprobs += [each["logprob"] for each in (choice["logprobs"] or {}).get("content", ())]
            self.text += choice["delta"].get("content") or ""
            self.reason = choice["finish_reason"] or self.reason
        if event.get("usage"):
            self.completion_tokens = self.tokens_before + event["usage"]["completion_tokens"]

    def answer(self, error: str = "") -> Answer:
        """What has come."""
        said, logprobs = (self.text, self.reason, self.completion_tokens), tuple(self.logprobs)
        return Answer(*said, logprobs, error, self.first_s, self.request_id)


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

    def __init__(
        self, stack: RunningStack, num: int, num_tokens: int, *, filler: str = "", continues: bool = False
    ) -> None:
        self.num = num
        # Whether a client asks for the rest of a stream that was cut, as docs/operations.md says.
        self._continues = continues
        self.num_continued = 0
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
        """One answer from its request to its end; adds the times between its chunks to `gaps_s`."""
        reading = Reading(gaps_s)
        error = await self._stream(number, reading)
        if error and self._continues and reading.text:
            self.num_continued += 1
            while error and time.perf_counter() < reading.last_s + PATIENCE_S:
                reading.tokens_before = len(reading.logprobs)
                error = await self._stream(number, reading)
                # Until whoever was lost is back, if it was the only one.
                await asyncio.sleep(RETRY_S if error else 0)
        if error and reading.last_s:
            # It has waited for a chunk, and hears that none comes.
            gaps_s.append(time.perf_counter() - reading.last_s)
        return reading.answer(error)

    def _body(self, number: int, reading: Reading) -> dict[str, Any]:
        question = f"Tell me story number {number}, please.{self._filler}"
        begun = [{"role": "assistant", "content": reading.text}] if reading.text else []
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": question}, *begun],
            "continue_final_message": bool(begun),
            "temperature": 0,
            # Simulated tokens depend on it; greedy ones of a model do not.
            "seed": number,
            "max_tokens": self._num_tokens - len(reading.logprobs),
            "ignore_eos": True,
            # A chunk for every token, also for those without text.
            "logprobs": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def _stream(self, number: int, reading: Reading) -> str:
        """Reads one stream to its end; returns how it failed."""
        body = self._body(number, reading)
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                reading.request_id = response.headers.get("x-request-id", "")
                async for line in response.aiter_lines():
                    if response.status_code != 200:
                        return line
                    if not line.startswith("data: {"):
                        continue
                    event = msgspec.json.decode(line[6:])
                    if "error" in event:
                        return str(event["error"])
                    reading.chunk(event)
        except httpx.HTTPError as error:
            return repr(error)
        return ""

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
