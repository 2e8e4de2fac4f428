"""Planning step n + 1 while step n runs, against the plain loop: the same tokens, sooner.

The real core loop and scheduler, messages encoded as for the front; the simulated device sleeps as long as
a step of 64 decoding sequences would take on an accelerator. The plain loop adds planning, taking results in
and encoding to that, during which a real device would stand still.

    python -m benchmarks.engine.overlap [--json OUT]
"""

from __future__ import annotations

import time

from benchmarks.engine.report import Row, arguments, publish
from engine.config import CacheConfig, EngineConfig, SchedulerConfig, SimulatedConfig
from engine.core import messages
from engine.core.frames import encode
from engine.core.loop import EngineLoop
from engine.runner.simulated import build
from engine.scheduler import Scheduler
from engine.types import Request, SamplingParams
from runtime.config import ModelConfig

_NUM_STREAMS = 64
_NUM_TOKENS = 200
_STEPS_MS = (3.0, 6.0, 12.0)


class _Mailbox:
    """Hands all requests over at once and counts tokens."""

    def __init__(self, requests: list[Request]) -> None:
        self._commands: list[messages.Command] = [messages.Submit(request) for request in requests]
        self.tokens: dict[int, list[int]] = {request.request_id: [] for request in requests}
        self.num_ended = 0
        self.num_bytes = 0

    def submit(self, request: Request) -> None:
        """Hands over one more."""
        self._commands.append(messages.Submit(request))
        self.tokens[request.request_id] = []

    def receive(self, timeout_s: float) -> list[messages.Command]:
        """Everything that was not received before."""
        commands, self._commands = self._commands, []
        return commands

    def send(self, message: messages.Report) -> None:
        """Encodes as the socket would."""
        self.num_bytes += len(encode(message))
        if isinstance(message, messages.StepDone):
            for event in message.events:
                self.tokens[event.request_id] += event.token_ids
                self.num_ended += event.finish_reason is not None


def run(step_ms: float, *, overlap: bool) -> tuple[dict[int, list[int]], float, int]:
    """(tokens by request, seconds, steps) of one run."""
    config = EngineConfig(
        simulated=True,
        scheduler=SchedulerConfig(max_num_seqs=_NUM_STREAMS, max_num_batched_tokens=4096),
        simulation=SimulatedConfig(step_ms=step_ms),
    )
    runner, memory, _ = build(config, ModelConfig(path="simulated"))
    requests = [
        Request(
            request_id=index,
            external_id=str(index),
            prompt_token_ids=tuple(range(index, index + 60)),
            sampling=SamplingParams(seed=index, max_tokens=_NUM_TOKENS),
        )
        for index in range(_NUM_STREAMS)
    ]
    mailbox = _Mailbox(requests)
    scheduler = Scheduler(config.scheduler, CacheConfig(), memory, model="simulated")
    loop = EngineLoop(scheduler, runner, mailbox, overlap=overlap)
    began, num_steps = time.perf_counter(), 0
    while mailbox.num_ended < _NUM_STREAMS:
        loop.step()
        num_steps += 1
    return mailbox.tokens, time.perf_counter() - began, num_steps


def main() -> None:
    """Both loops for every length of a step; no figures when their tokens differ."""
    options = arguments(__doc__ or "")
    rows: list[Row] = []
    for step_ms in _STEPS_MS:
        expected: dict[int, list[int]] | None = None
        plain_s = 0.0
        for name, overlap in (("baseline: plain", False), ("ours: overlapped", True)):
            tokens, seconds, num_steps = run(step_ms, overlap=overlap)
            expected, plain_s = expected or tokens, plain_s or seconds
            if tokens != expected:
                raise SystemExit("overlapped steps changed the tokens; no figures")
            rows.append(
                {
                    "step ms": step_ms,
                    "loop": name,
                    "steps": num_steps,
                    "ms between steps": seconds / num_steps * 1000,
                    "tokens/s": _NUM_STREAMS * _NUM_TOKENS / seconds,
                    "speed-up %": 100 * (plain_s / seconds - 1),
                }
            )
    notes = f"{_NUM_STREAMS} streams of {_NUM_TOKENS} tokens; both loops give the same tokens."
    publish("Overlapped scheduling (simulated device, wall clock)", rows, options.json, notes)


if __name__ == "__main__":
    main()
