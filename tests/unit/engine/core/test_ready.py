"""A core that says that it is ready has everything made, and knows its speed: the bundled model's, whole."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import llguidance
import msgspec
import pytest

from contract.frames import FrameBuffer
from engine.config import EngineConfig
from engine.core import __main__ as core
from engine.core import messages
from engine.core.messages import CoreSocket, encode
from engine.types import GrammarSpec, Request, SamplingParams
from runtime.config import ModelConfig

BUNDLED = "models/millrace-nano"
VOCABULARY = 2048


class Front:
    """The other end of a core's socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = FrameBuffer()
        self._decoder = msgspec.msgpack.Decoder(messages.Report)
        self._reports: list[messages.Report] = []
        self._num_requests = 0

    def say(self, *commands: messages.Command) -> None:
        """Sends commands, in one piece."""
        self._connection.sendall(b"".join(map(encode, commands)))

    def next(self) -> messages.Report:
        """The core's next report."""
        while not self._reports:
            data = self._connection.recv(1 << 20)
            assert data, "the core ended"
            self._reports += map(self._decoder.decode, self._buffer.feed(data))
        return self._reports.pop(0)

    def ready(self) -> messages.Ready:
        """Waits until the core is."""
        while not isinstance(report := self.next(), messages.Ready):
            assert not isinstance(report, messages.CoreRefused | messages.Broken), report
        return report

    def ask(self, *prompts: int, grammar: GrammarSpec | None = None, **sampling: Any) -> None:
        """Has prompts of so many tokens answered, at the same time."""
        requests = []
        for num_tokens in prompts:
            self._num_requests += 1
            prompt = tuple((self._num_requests + 7 * place) % VOCABULARY for place in range(num_tokens))
            requests.append(
                Request(
                    request_id=self._num_requests,
                    external_id="",
                    prompt_token_ids=prompt,
                    sampling=SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **sampling}),
                    grammar=grammar,
                )
            )
        self.say(*map(messages.Submit, requests))
        num_open = len(requests)
        while num_open:
            report = self.next()
            for event in report.events if isinstance(report, messages.StepDone) else ():
                assert event.failure is None
                num_open -= event.finish_reason is not None


def _counted(counts: list[str], name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        counts.append(name)
        return real(*arguments, **options)

    return call


def test_nothing_is_made_after_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked first: as many as there may be, the longest step, or a grammar."""
    from engine.model import native_decoder
    from engine.sampling import grammar

    made: list[str] = []
    monkeypatch.setattr(native_decoder, "Program", _counted(made, "program", native_decoder.Program))
    reading = _counted(made, "tokenizer", grammar.whole_tokenizer_json)
    monkeypatch.setattr(grammar, "whole_tokenizer_json", reading)
    # What it does to the process it does to that of the tests, too.
    monkeypatch.setattr(core, "_settle", lambda watch: None)
    config = EngineConfig(native="required")
    ours, its = socket.socketpair()
    with ours, its:
        front = Front(ours)
        serving = threading.Thread(target=core.serve_core, args=(CoreSocket(its),), daemon=True)
        serving.start()
        front.say(messages.Start(config, ModelConfig(path=BUNDLED)))
        ready = front.ready()
        assert min(ready.speed.prompt_tokens_per_s, ready.speed.tokens_per_s_alone) > 0
        assert ready.speed.tokens_per_s_together > 0
        assert {"program", "tokenizer"} <= set(made)
        made.clear()
        limits = config.scheduler
        front.ask(*[limits.max_num_batched_tokens // limits.max_num_seqs] * limits.max_num_seqs)
        front.ask(limits.max_num_batched_tokens)
        front.ask(20, 30, temperature=0.8, top_p=0.9, presence_penalty=0.5, logprobs=2)
        regex = llguidance.LLMatcher.grammar_from_regex("[0-9]{3}")
        front.ask(20, grammar=GrammarSpec(digest="", payload=regex.encode(), backend="llguidance/1"))
        front.say(messages.Stop())
        serving.join()
    assert made == []
