"""The engine's core in this process: loop, scheduler and runner as they serve, without sockets."""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.device import Gpu
from benchmarks.gpu.random_model import LLAMA_8B, TINY, drawn_weights, write_checkpoint
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import messages
from engine.core.loop import EngineLoop
from engine.runner.build import build_here
from engine.scheduler import Scheduler
from engine.types import MemoryPlan, ModelFacts, Request, SamplingParams, TokenEvent
from services.config import ModelConfig

Listener = Callable[[TokenEvent], None]
# How tokens are drawn: what a benchmark of speed usually asks for, and what a conversation does.
DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
}


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
    """One engine with drawn weights. Prompts are random, so nothing of them is cached."""

    def __init__(self, loop: EngineLoop, mailbox: Mailbox, memory: MemoryPlan, facts: ModelFacts) -> None:
        self.loop, self.mailbox, self.memory, self.facts = loop, mailbox, memory, facts
        self._next_id = 1
        self._random = random.Random(0)

    def submit(self, num_prompt_tokens: int, max_tokens: int, draw: str = "greedy") -> int:
        """A request of so many tokens, drawn as DRAWS says; returns its id."""
        request_id, self._next_id = self._next_id, self._next_id + 1
        vocabulary = self.facts.vocab_size
        prompt = tuple(self._random.randrange(vocabulary) for _ in range(num_prompt_tokens))
        self.mailbox.commands.append(
            messages.Submit(
                Request(
                    request_id=request_id,
                    external_id=str(request_id),
                    prompt_token_ids=prompt,
                    sampling=SamplingParams(
                        **DRAWS[draw], seed=request_id, max_tokens=max_tokens, ignore_eos=True
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


@contextlib.contextmanager
def opened(gpu: Gpu, *, kind: str, max_num_seqs: int, max_model_len: int) -> Iterator[InProcessEngine]:
    """An engine of the 8B shape (tiny in a rehearsal), `kind` being "bf16" or "fp8" (weights and KV)."""
    shape = LLAMA_8B | (TINY if gpu.rehearses else {})
    quantized: dict[str, Any] = {}
    if kind == "fp8":
        quantized = {"quantize": gpu.pick("fp8", "int8")}
    config = EngineConfig(
        device=gpu.device.type,
        dtype=gpu.pick("bfloat16", "float32"),
        native=gpu.pick("auto", "off"),
        max_model_len=max_model_len,
        scheduler=SchedulerConfig(
            max_num_batched_tokens=gpu.pick(8192, 64),
            max_num_seqs=max_num_seqs,
            # One load at a time: nobody else's time to first token is to be protected.
            long_prefill_share=1.0,
            refuse_early=False,
        ),
        cache=CacheConfig(
            kv_dtype="fp8" if kind == "fp8" else "auto",
            memory_fraction=0.92,
            kv_cache_bytes=gpu.pick(0, 4 << 20),
            prefix_caching=False,
        ),
        **quantized,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, shape)
        began = time.monotonic()
        with drawn_weights():
            runner, memory, facts = build_here(config, ModelConfig(path=str(folder)), _quiet)
        print(
            f"  {kind}: attention {facts.attention_backend}, {memory.num_blocks} blocks, "
            f"ready after {time.monotonic() - began:.0f} s",
            flush=True,
        )
        mailbox = Mailbox()
        scheduler = Scheduler(config.scheduler, config.cache, memory, model=str(folder), window=facts.window)
        loop = EngineLoop(scheduler, runner, mailbox, overlap=facts.device.startswith("cuda"))
        try:
            yield InProcessEngine(loop, mailbox, memory, facts)
        finally:
            runner.close()


def _quiet(stage: str, fraction: float) -> None:
    """Progress is not reported."""
