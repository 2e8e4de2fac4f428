"""An engine's first steps: everything is made, the speed is known, and nothing of them stays."""

from __future__ import annotations

import msgspec
import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig, SimulatedConfig
from engine.core import warm_up as warm_up_module
from engine.core.warm_up import TOGETHER, WarmUp
from engine.policy.rates import StepRate
from engine.runner.simulated import SimulatedRunner
from engine.scheduler import Scheduler
from engine.types import NOT_MEASURED, MeasuredSpeed, ModelFacts, SchedulerOutput
from tests.unit.engine.driver import memory_plan

# One token more takes a hundredth of what the step takes by itself.
STEP_MS, TOKENS_PER_S = 1.0, 100_000.0
FACTS = ModelFacts(
    max_model_len=1024,
    vocab_size=100,
    eos_token_ids=(),
    dtype="none",
    attention_backend="simulated",
    device="none",
    num_layers=0,
)


class Recorder(SimulatedRunner):
    """Remembers its plans."""

    def __init__(self, config: SimulatedConfig) -> None:
        super().__init__(config)
        self.plans: list[SchedulerOutput] = []

    def launch(self, plan: SchedulerOutput):  # type: ignore[no-untyped-def]
        self.plans.append(plan)
        return super().launch(plan)


def warmed(
    *, num_blocks: int = 256, max_num_seqs: int = 16, **simulation: float
) -> tuple[WarmUp, Recorder, Scheduler]:
    scheduling = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=512)
    config = EngineConfig(scheduler=scheduling)
    runner = Recorder(
        SimulatedConfig(**{"step_ms": STEP_MS, "tokens_per_s": TOKENS_PER_S, "vocab_size": 100, **simulation})
    )
    memory = memory_plan(num_blocks, 4, 1024)
    scheduler = Scheduler(scheduling, CacheConfig(), memory, model="m")
    return WarmUp(runner, scheduler, config, memory, FACTS, overlap=False), runner, scheduler


def test_speeds_are_those_of_the_steps() -> None:
    warm_up, _, _ = warmed()
    speed = warm_up.run()
    expected = {
        "prompt_tokens_per_s": 512 / (STEP_MS / 1e3 + 512 / TOKENS_PER_S),
        "prompt_tokens": 512,
        "short_prompt_tokens_per_s": 32 / (STEP_MS / 1e3 + 32 / TOKENS_PER_S),
        "short_prompt_tokens": 32,
        "tokens_per_s_alone": 1 / (STEP_MS / 1e3 + 1 / TOKENS_PER_S),
        "tokens_per_s_together": TOGETHER / (STEP_MS / 1e3 + TOGETHER / TOKENS_PER_S),
        "num_together": TOGETHER,
    }
    assert msgspec.structs.asdict(speed) == pytest.approx(expected)


def test_nothing_stays_with_the_runner_or_in_the_cache() -> None:
    warm_up, runner, scheduler = warmed()
    warm_up.run()
    assert (runner.num_states(), scheduler.num_requests, scheduler.has_work) == (0, 0, False)
    scheduler.check_invariants()


@pytest.mark.parametrize(
    ("limit_s", "num_sequences", "num_tokens"),
    [
        (512 / TOKENS_PER_S, 16, 512),
        (200 / TOKENS_PER_S, 16, 16 * 12),
        # No fewer sequences than are measured afterwards.
        (4 / TOKENS_PER_S, TOGETHER, TOGETHER),
    ],
)
def test_the_largest_step_there_may_be_is_taken_as_far_as_time_allows(
    limit_s: float, num_sequences: int, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up_module, "_LARGEST_LIMIT_S", limit_s * 1.001)
    warm_up, runner, _ = warmed(step_ms=0.0)
    warm_up.run()
    # Those that are measured together come after it.
    together = [
        sum(each.num_tokens for each in plan.scheduled)
        for plan in runner.plans
        if len(plan.scheduled) == num_sequences
    ]
    assert together[:4] == [num_tokens, *[num_sequences] * 3]


def test_an_answer_is_drawn_as_most_are() -> None:
    warm_up, runner, _ = warmed()
    warm_up.run()
    drawn = [new.sampling for plan in runner.plans for new in plan.new_sequences]
    assert any(each.temperature and each.top_k and each.top_p < 1 and each.logprobs for each in drawn)
    assert any(each.greedy for each in drawn)


@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(2, 16), (3, 1), (16, 2), (40, 64)])
def test_small_caches_and_batches_are_measured_as_far_as_they_go(num_blocks: int, max_num_seqs: int) -> None:
    warm_up, _, scheduler = warmed(num_blocks=num_blocks, max_num_seqs=max_num_seqs)
    speed = warm_up.run()
    assert speed.num_together <= max_num_seqs
    assert not scheduler.has_work
    assert not warm_up.broken


def test_a_runner_that_breaks_is_told_and_not_asked_again() -> None:
    warm_up, runner, _ = warmed(break_token_id=7)
    assert warm_up.run().tokens_per_s_together == 0.0
    assert warm_up.broken
    assert runner.num_states() <= 1


def test_forecasts_start_from_what_was_measured() -> None:
    assert StepRate.of(NOT_MEASURED).seconds_for(100) == 0.0
    rate = StepRate.of(MeasuredSpeed(prompt_tokens_per_s=200.0, tokens_per_s_alone=50.0))
    assert rate.seconds_for(100) == pytest.approx(0.5)
    assert rate.step_s == pytest.approx(0.02)
