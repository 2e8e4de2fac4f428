"""The load client of an engine's core in this process: loop, scheduler and runner as they serve, without
sockets. `services.bench` is the one for servers; whoever drives an engine without a server does so by this.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.core import messages
from engine.core.loop import EngineLoop
from engine.types import MemoryPlan, ModelFacts, Request, SamplingParams, TokenEvent

Listener = Callable[[TokenEvent], None]
# What a request asks for, by name.
DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
}
# Of which nothing holds that was proposed; measured for nobody else's sake.
HOT: dict[str, Any] = {"temperature": 2.0}


@dataclass
class Mailbox:
    """Commands that wait, and what came of them."""

    commands: deque[messages.Command] = field(default_factory=deque)
    listener: Listener = lambda event: None
    totals: list[messages.StepTotals] = field(default_factory=list)
    broken: str = ""

    def receive(self, timeout_s: float) -> list[messages.Command]:
        found = list(self.commands)
        self.commands.clear()
        return found

    def send(self, message: messages.Report) -> None:
        if isinstance(message, messages.StepDone):
            self.totals.extend(message.totals)
            for event in message.events:
                if event.failure is not None:
                    raise RuntimeError(f"a request failed: {event.failure}")
                self.listener(event)
        elif isinstance(message, messages.Broken):
            raise RuntimeError(f"the runner broke: {message.cause}")


class InProcessEngine:
    """One engine. Prompts are random, so nothing of them is cached."""

    def __init__(self, loop: EngineLoop, mailbox: Mailbox, memory: MemoryPlan, facts: ModelFacts) -> None:
        self.loop, self.mailbox, self.memory, self.facts = loop, mailbox, memory, facts
        self.captures = False
        self._next_id = 1
        self._random = random.Random(0)

    def submit(
        self,
        num_prompt_tokens: int,
        max_tokens: int,
        sampling: str = "greedy",
        prompt: tuple[int, ...] | None = None,
        *,
        ends: bool = False,
        tenant: str = "",
    ) -> int:
        """A request of so many random tokens, or of `prompt`; returns its id, which is also its seed. `ends`:
        the answer is over where the model ends it.
        """
        request_id, self._next_id = self._next_id, self._next_id + 1
        vocabulary = self.facts.vocab_size
        prompt = prompt or tuple(self._random.randrange(vocabulary) for _ in range(num_prompt_tokens))
        self.mailbox.commands.append(
            messages.Submit(
                Request(
                    request_id=request_id,
                    external_id=str(request_id),
                    prompt_token_ids=prompt,
                    tenant=tenant,
                    sampling=SamplingParams(
                        max_tokens=max_tokens,
                        ignore_eos=not ends,
                        stop_token_ids=self.facts.eos_token_ids if ends else (),
                        seed=request_id,
                        **(HOT if sampling == "hot" else DRAWS[sampling]),
                    ),
                    arrival_s=time.monotonic(),
                )
            )
        )
        return request_id

    def cancel_all(self, request_ids: list[int]) -> None:
        """Ends requests, and steps until the engine is empty."""
        self.mailbox.commands.extend(messages.Cancel(request_id) for request_id in request_ids)
        for _ in range(4):
            self.loop.step()

    def run_until(self, done: Callable[[], bool], limit_s: float = 120.0) -> None:
        """Steps until `done`; raises RuntimeError when that takes longer than `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not done():
            self.loop.step()
            if time.monotonic() > deadline:
                raise RuntimeError(f"no progress in {limit_s:.0f} s")
