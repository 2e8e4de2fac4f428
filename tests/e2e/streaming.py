"""Streams that are under way while something happens to the stack that serves them."""

from __future__ import annotations

import threading

from tests.e2e.stack import LIMIT_S, Stack

# Slow enough that a stream is under way when something happens to it, deterministic, and without weights.
PACE = {"MILLRACE_ENGINE__SIMULATION__STEP_MS": "20"}
NUM_TOKENS = 60


def stream_tokens(stack: Stack, started: threading.Event) -> tuple[int, str | None]:
    """Reads one stream to its end: number of completion tokens, and why it ended."""
    with stack.openai() as client:
        stream = client.completions.create(
            model=stack.model,
            prompt=[300, 301, 302],
            max_tokens=NUM_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        reason, count = None, 0
        for chunk in stream:
            started.set()
            if chunk.choices and chunk.choices[0].finish_reason:
                reason = chunk.choices[0].finish_reason
            if chunk.usage:
                count = chunk.usage.completion_tokens
        return count, reason


class Background:
    """One call in another thread, with its result."""

    def __init__(self, stack: Stack) -> None:
        self.started = threading.Event()
        self.result: tuple[int, str | None] | None = None
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(stack,))
        self._thread.start()
        assert self.started.wait(LIMIT_S), stack.transcript()

    def _run(self, stack: Stack) -> None:
        try:
            self.result = stream_tokens(stack, self.started)
        except BaseException as error:
            self.failure = error
            self.started.set()

    def finish(self) -> tuple[int, str | None] | None:
        self._thread.join(LIMIT_S)
        if self.failure is not None:
            raise self.failure
        return self.result
