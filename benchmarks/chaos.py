"""Engines die by SIGKILL, one after another, under running streams: does a client notice more than a pause?

`python -m benchmarks.chaos [--seconds 120] [--bundled]`

Starts a whole stack with three engines (simulated, or the bundled model with --bundled). Every client asks
the same greedy question again and again; what the answer is was found out before, undisturbed, and once more
as a control. Then one engine is killed every ten seconds, in turn, and the supervisor starts it again. Every
answer whose stream began must arrive whole and equal, byte for byte. The longest pause is the longest time
that a client waited for the next chunk of a stream that had begun.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec

from benchmarks.stack import RunningStack, running_stack, write_result
from services.supervisor.config import BUNDLED_MODEL

NUM_ENGINES = 3
KILL_EVERY_S = 10.0
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


@dataclass
class Observed:
    """What all clients saw while engines died. Times are seconds."""

    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    gaps_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    largest_logprob_change: float = 0.0

    def note(self, answer: Answer, expected: Answer) -> None:
        """One more stream has ended."""
        self.num_tokens += answer.completion_tokens
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

    def __init__(self, stack: RunningStack, num: int, num_tokens: int) -> None:
        self.num = num
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
            "messages": [{"role": "user", "content": f"Tell me story number {number}, please."}],
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
        last_s = 0.0
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
                    last_s = now_s
                    event = msgspec.json.decode(line[6:])
                    if "error" in event:
                        return Answer(text, reason, tokens, error=str(event["error"]))
                    for choice in event["choices"]:
                        logprobs += [
                            each["logprob"] for each in (choice["logprobs"] or {}).get("content", ())
                        ]
                        text += choice["delta"].get("content") or ""
                        reason = choice["finish_reason"] or reason
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        except httpx.HTTPError as error:
            return Answer(text, reason, tokens, error=repr(error))
        return Answer(text, reason, tokens, tuple(logprobs))

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


async def kill_engines(stack: RunningStack, end_s: float) -> int:
    """Kills one engine every KILL_EVERY_S, in turn; returns how many. One that is not back yet is spared."""
    killed: dict[str, int] = {}
    num_kills = 0
    while time.monotonic() + KILL_EVERY_S < end_s:
        await asyncio.sleep(KILL_EVERY_S)
        name = f"engine-{num_kills % NUM_ENGINES}"
        pid = stack.pids()[name]
        if killed.get(name) == pid:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed[name] = pid
            num_kills += 1
    return num_kills


async def run(stack: RunningStack, num_streams: int, num_tokens: int, seconds: float) -> dict[str, object]:
    """Reference, control, chaos; the figures of all three."""
    clients = Clients(stack, num_streams, num_tokens)
    expected = await clients.ask_all()
    whole = sum(not each.error and each.completion_tokens == num_tokens for each in expected)
    control = await clients.ask_all()
    observed = Observed()
    end_s = time.monotonic() + seconds
    killing = asyncio.create_task(kill_engines(stack, end_s))
    await clients.ask_until(end_s, expected, observed)
    num_kills = await killing
    await clients.close()
    gaps_s = sorted(observed.gaps_s)
    return {
        "engines": NUM_ENGINES,
        "concurrent_streams": num_streams,
        "tokens_per_stream": num_tokens,
        "seconds": seconds,
        "reference_whole": whole,
        "control_identical": sum(pair[0] == pair[1] for pair in zip(expected, control, strict=True)),
        "kills": num_kills,
        "continuations": int(stack.counter("gateway", "millrace_resubmissions_total", 'outcome="continued"')),
        "streams": sum(observed.outcomes.values()),
        **{name: observed.outcomes[name] for name in ("identical", "different", "lost", "refused")},
        "errors": dict(observed.errors),
        "tokens": observed.num_tokens,
        "largest_logprob_change": observed.largest_logprob_change,
        "chunk_gap_p50_ms": round(gaps_s[len(gaps_s) // 2] * 1000, 1),
        "chunk_gap_p999_ms": round(gaps_s[int(len(gaps_s) * 0.999)] * 1000, 1),
        "longest_pause_ms": round(gaps_s[-1] * 1000, 1),
    }


def main() -> None:
    """Prints the figures, and writes them as JSON with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=120, help="of every answer")
    parser.add_argument("--bundled", action="store_true", help="the model of this repository, not simulated")
    parser.add_argument("--json", type=Path, help="write the result here too")
    options = parser.parse_args()
    served = ("--model", str(BUNDLED_MODEL)) if options.bundled else ("--simulated",)
    with running_stack(CONFIG, "--engines", str(NUM_ENGINES), *served) as stack:
        figures = asyncio.run(run(stack, options.streams, options.tokens, options.seconds))
    figures = {"model": "bundled" if options.bundled else "simulated", **figures}
    for name, value in figures.items():
        print(f"{name:20} {value}")
    write_result(options.json, figures)
    if figures["lost"] or figures["different"] or figures["refused"]:
        raise SystemExit("a client noticed more than a pause")


if __name__ == "__main__":
    main()
