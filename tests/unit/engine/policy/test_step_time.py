"""What a step will take is learned from steps: a part for answers, and a part for chunks of prompts."""

from __future__ import annotations

import math
import random

import pytest

from engine.policy.step_time import StepTime, Trend
from engine.types import MeasuredSpeed


def learned(rng: random.Random, *, noise: float = 0.0) -> StepTime:
    """40 ms and 2.5 ms for each answer; 90 ms and a millisecond a token for chunks."""
    time = StepTime()
    for _ in range(200):
        decodes, chunk = rng.randrange(0, 33), rng.choice((0, 64, 100, 512))
        if decodes or chunk:
            decode_s = 0.04 + 0.0025 * decodes if decodes else 0.0
            seconds = decode_s + (0.09 + 0.001 * chunk if chunk else 0.0)
            time.observe(decodes, chunk, seconds * rng.uniform(1 - noise, 1 + noise))
    return time


def test_both_parts_are_found_from_steps_that_have_both() -> None:
    time = learned(random.Random(1))
    assert time.decode_s(20) == pytest.approx(0.09)
    assert time.chunk_s(256) == pytest.approx(0.346, rel=1e-3)
    assert time.chunk_within(0.346) == pytest.approx(256, rel=1e-3)
    assert time.chunk_within(0.05) == 0.0
    # Half of a chunk's time is its own at 90 tokens, nine tenths at 810.
    assert time.chunk_at(0.5) == pytest.approx(90, rel=1e-3)
    assert time.chunk_at(0.9) == pytest.approx(810, rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_mislead(seed: int) -> None:
    time = learned(random.Random(seed), noise=0.1)
    assert time.decode_s(20) == pytest.approx(0.09, rel=0.15)
    assert time.chunk_s(256) == pytest.approx(0.346, rel=0.15)


def test_a_step_that_something_else_held_up_counts_for_little() -> None:
    time = learned(random.Random(1))
    time.observe(20, 0, 10.0)
    assert time.decode_s(20) < 0.11


def test_a_machine_that_became_slower_is_learned() -> None:
    time = learned(random.Random(1))
    for _ in range(200):
        time.observe(20, 0, 2.0)
    assert time.decode_s(20) == pytest.approx(2.0, rel=0.01)


def test_one_size_says_nothing_of_others_and_is_taken_in_proportion() -> None:
    trend = Trend()
    trend.add(100, 0.2)
    trend.add(100, 0.2)
    assert trend.at(50) == pytest.approx(0.1)
    assert trend.fixed_s == 0.0


def test_what_was_learned_of_sizes_outlives_many_steps_of_one() -> None:
    trend = Trend()
    for work in (100, 400) * 10:
        trend.add(work, 0.1 + 0.001 * work)
    for _ in range(1000):
        trend.add(400, 0.5)
    assert trend.at(100) == pytest.approx(0.2, rel=0.01)


def test_where_a_step_takes_its_time_whatever_is_in_it_more_costs_nothing() -> None:
    time = StepTime()
    for chunk in (0, 30, 60, 24) * 10:
        time.observe(1, chunk, 0.1)
    # A rate that was measured over small chunks says nothing of larger ones.
    assert time.chunk_within(0.02) == math.inf


def test_answers_that_were_never_seen_cost_what_prompts_do_and_nothing_is_free_of_charge_for_long() -> None:
    time = StepTime()
    assert (time.decode_s(8), time.chunk_s(8), time.chunk_within(0.0)) == (0.0, 0.0, math.inf)
    time.observe(0, 400, 1.0)
    assert time.decode_s(4) == pytest.approx(0.01)
    for _ in range(30):
        time.observe(1, 0, 0.1)
        # Free at first, and not later.
        time.observe(1, 40, 0.1)
    assert time.chunk_s(40) < 0.03
    for _ in range(200):
        time.observe(1, 40, 0.3)
    assert time.chunk_s(40) == pytest.approx(0.2, rel=0.05)


def test_it_begins_with_what_was_measured_at_the_start() -> None:
    speed = MeasuredSpeed(
        prompt_tokens_per_s=512 / 0.6,
        prompt_tokens=512,
        short_prompt_tokens_per_s=32 / 0.12,
        short_prompt_tokens=32,
        tokens_per_s_alone=1 / 0.04,
        tokens_per_s_together=8 / 0.06,
        num_together=8,
    )
    time = StepTime.of(speed)
    assert time.chunk_s(272) == pytest.approx(0.36)
    assert time.decode_s(15) == pytest.approx(0.08)
    assert StepTime.of(MeasuredSpeed()).chunk_within(1.0) == math.inf
