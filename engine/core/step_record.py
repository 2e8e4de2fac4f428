"""What steps of this engine take, by what is in them: measured with the engine's own loop, for simulators.

    python -m engine.core.step_record --json FILE [--config CONFIG]

The model of the configuration is loaded as ever. Then requests of its own are served: few and many answers at
a time, with short and long contexts, prompts alone and prompts beside answers. Each step's time is the whole
turn of the loop, planning included. `millrace simulate --steps FILE` reads what is written.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import msgspec

from engine.config import CacheConfig, EngineConfig, SchedulerConfig, load
from engine.core.loop import EngineLoop
from engine.core.warm_up import OwnRequests, WarmUp
from engine.runner.base import PendingStep, Runner
from engine.scheduler import Scheduler
from engine.types import (
    MeasuredSpeed,
    MemoryPlan,
    ModelFacts,
    SamplingParams,
    SchedulerOutput,
)
from runtime.config import read_tables
from runtime.errors import ConfigError
from runtime.models import own_model

_CONFIG = 2
# Answers at a time, contexts in tokens, and tokens of each answer.
_STREAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (64, 512, 2048, 8192)
_ANSWER_TOKENS = 24
# Prompts that are computed alone, and beside answers.
_PROMPTS = (16, 64, 256, 1024, 4096)
# A part is left out that would take longer, by what was measured before it.
_PART_S = 20.0


class StepShape(msgspec.Struct, frozen=True, array_like=True):
    """What is in a step: answers, tokens of prompts, and how many positions both look back on."""

    num_answers: int
    prompt_tokens: int
    answer_positions: int
    prompt_positions: float

    @classmethod
    def of(cls, plan: SchedulerOutput) -> StepShape:
        """Rows of one token that sample count as answers."""
        answers = positions = prompt = 0
        looked_back = 0.0
        for row in plan.scheduled:
            if row.samples and row.num_tokens == 1 + len(row.draft_token_ids):
                answers += 1
                positions += row.start + row.num_tokens
            else:
                prompt += row.num_tokens
                looked_back += row.num_tokens * (row.start + (row.num_tokens + 1) / 2)
        return cls(answers, prompt, positions, looked_back)


class MeasuredStep(msgspec.Struct, frozen=True, array_like=True):
    """One step, and its seconds."""

    shape: StepShape
    seconds: float


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulator must know of one engine."""

    model: str
    device: str
    # Seconds from the start of the process to its readiness.
    load_s: float
    memory: MemoryPlan
    scheduler: SchedulerConfig
    cache: CacheConfig
    attention_balance: float | None
    speed: MeasuredSpeed
    steps: tuple[MeasuredStep, ...]


class _WatchedRunner:
    """A runner whose plans are remembered."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.last: SchedulerOutput | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def launch(self, plan: SchedulerOutput) -> PendingStep:
        """See Runner."""
        self.last = plan
        return self._runner.launch(plan)


class _Calibration:
    """A loop that serves this module alone, and what its steps took."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        memory: MemoryPlan,
        facts: ModelFacts,
        scheduler: Scheduler,
    ) -> None:
        self._watched = _WatchedRunner(runner)
        self._requests = OwnRequests("calibration", facts.vocab_size)
        self._loop = EngineLoop(scheduler, self._watched, self._requests)  # type: ignore[arg-type]
        self._scheduler = scheduler
        self._most_seqs = config.scheduler.max_num_seqs
        self._capacity = memory.capacity_tokens
        self._longest = min(facts.max_model_len, memory.max_model_len)
        self.steps: list[MeasuredStep] = []

    def _ask(self, num_tokens: int, num_output: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        self._requests.ask(num_tokens, sampling)

    def _serve(self) -> float:
        """Steps until all requests have ended; returns the seconds."""
        began_s = time.perf_counter()
        while self._requests.num_open or self._scheduler.has_work:
            self._watched.last = None
            start_s = time.perf_counter()
            self._loop.step()
            seconds = time.perf_counter() - start_s
            plan = self._watched.last
            if plan is not None and plan.scheduled:
                self.steps.append(MeasuredStep(StepShape.of(plan), seconds))
        return time.perf_counter() - began_s

    def run(self) -> None:
        """All parts that fit into the memory, and into their time."""
        for num_tokens in _PROMPTS:
            if not self._fits(1, num_tokens, 1):
                break
            self._ask(num_tokens, 1)
            self._ask(num_tokens, 1)
            if self._serve() > _PART_S:
                break
        for context in _CONTEXTS:
            for streams in _STREAMS:
                if streams > self._most_seqs or not self._fits(streams, context, _ANSWER_TOKENS):
                    break
                for _ in range(streams):
                    self._ask(context, _ANSWER_TOKENS)
                # A prompt that comes while they are answered.
                if self._fits(streams + 1, context, _ANSWER_TOKENS):
                    self._ask(context // 2 + 1, _ANSWER_TOKENS // 2)
                if self._serve() > _PART_S:
                    break

    def _fits(self, streams: int, num_tokens: int, num_output: int) -> bool:
        each = num_tokens + num_output
        return each <= self._longest and streams * (each + 32) <= self._capacity


def measured(config_path: Path | None) -> StepRecord:
    """Loads the configuration's model and measures it. Raises ConfigError."""
    from engine.core.__main__ import make_scheduler

    tables = read_tables(config_path)
    config, model = load(tables), own_model(tables)
    if config.make != "millrace":
        raise ConfigError('engine.make: steps are measured of engines of this suite; set make = "millrace"')
    if config.simulated:
        from engine.runner.simulated import build
    else:
        from engine.runner.build import build  # type: ignore[assignment]
    began_s = time.perf_counter()
    runner, memory, facts = build(config, model, lambda stage, fraction: None)
    try:
        if facts.tasks:
            raise ConfigError(f"model.path = {model.path!r}: it pools; models that generate are simulated")
        scheduler = make_scheduler(config, model, memory, facts)
        speed = WarmUp(runner, scheduler, config, memory, facts, overlap=False).run()
        load_s = time.perf_counter() - began_s
        calibration = _Calibration(
            runner, config, memory, facts, make_scheduler(config, model, memory, facts, speed)
        )
        calibration.run()
    finally:
        runner.close()
    balance = facts.attention_balance
    return StepRecord(
        model=model.path,
        device=facts.device,
        load_s=load_s,
        memory=memory,
        scheduler=config.scheduler,
        cache=config.cache,
        attention_balance=balance if balance < float("inf") else None,
        speed=speed,
        steps=tuple(calibration.steps),
    )


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on stderr where the configuration cannot work."""
    parser = argparse.ArgumentParser(prog="python -m engine.core.step_record", description=__doc__)
    parser.add_argument("--config", type=Path, help="configuration file (TOML)")
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    options = parser.parse_args(arguments)
    try:
        record = measured(options.config)
        options.json.write_bytes(msgspec.json.encode(record))
    except (ConfigError, OSError) as error:
        print(f"millrace simulate: {error}", file=sys.stderr)
        return _CONFIG
    print(f"{len(record.steps)} steps of {record.model} on {record.device}: {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
