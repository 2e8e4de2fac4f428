"""Streams that are under way while something happens to the stack that serves them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

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


class Client:
    """One streaming completion on its own thread, and the id of its request."""

    def __init__(
        self,
        stack: Stack,
        prompt: Sequence[int],
        max_tokens: int,
        tier: str = "standard",
        model: str = "",
        key: str | None = None,
    ) -> None:
        self.request_id = ""
        self._stack = stack
        self._prompt = list(prompt)
        self._max_tokens = max_tokens
        self._tier = tier
        self._model = model or stack.model
        self._key = key
        # Set at the first output.
        self.started = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._stack.openai(self._key) as client:
            answer = client.completions.with_raw_response.create(
                model=self._model,
                prompt=self._prompt,
                max_tokens=self._max_tokens,
                stream=True,
                extra_body={"ignore_eos": True, "service_tier": self._tier},
            )
            self.request_id = str(answer.headers["x-request-id"])
            for _ in answer.parse():
                self.started.set()

    @property
    def is_running(self) -> bool:
        """Whether the stream goes on."""
        return self._thread.is_alive()

    def wait(self) -> str:
        """The request id, once the stream has ended."""
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        return self.request_id


def tokens(count: int) -> list[int]:
    """A prompt of so many."""
    return [300 + index % 500 for index in range(count)]
