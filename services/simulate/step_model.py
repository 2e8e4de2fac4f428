"""How long a simulated step takes: a straight line over what is in it, fitted to an engine's own steps.

    seconds = fixed + answers * a + answered positions * b
              + (fixed for a chunk + prompt tokens * c + prompt positions * d, where there are prompts)

No term is negative. Vidur (Agrawal et al., MLSys 2024) fits a forest for each operator; lines over a whole
step say as much where they are asked within what was measured, and can be read.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.config import CacheConfig, SchedulerConfig
from engine.core.step_record import MeasuredStep, StepRecord, StepShape
from engine.types import NOT_MEASURED, MeasuredSpeed, MemoryPlan
from runtime.errors import ConfigError

# Fewest steps that a fit is made of, of each kind.
_FEWEST = 8
# Factors that noise is drawn from.
_NUM_FACTORS = 4096
# Parts of the measured steps, at both ends, that noise leaves out: a machine that did something else.
_TRIMMED = 0.01


class StepModel(NamedTuple):
    """Seconds of a step."""

    step_s: float
    answer_s: float
    answer_position_s: float
    chunk_s: float
    prompt_token_s: float
    prompt_position_s: float
    # What a step really took, as a multiple of its forecast: equally likely ones, 1 on average.
    noise: tuple[float, ...] = (1.0,)

    def seconds(self, shape: StepShape) -> float:
        """Without noise."""
        seconds = self.answers_s(shape.num_answers, shape.answer_positions)
        if shape.prompt_tokens:
            seconds += (
                self.chunk_s
                + shape.prompt_tokens * self.prompt_token_s
                + shape.prompt_positions * self.prompt_position_s
            )
        return seconds

    def answers_s(self, num_answers: int, positions: int) -> float:
        """Of a step that has answers alone."""
        return self.step_s + num_answers * self.answer_s + positions * self.answer_position_s

    def factors(self, seed: int) -> list[float]:
        """Noise in the order in which one engine's steps take it, over and over."""
        if len(self.noise) == 1:
            return list(self.noise)
        return random.Random(seed).choices(self.noise, k=_NUM_FACTORS)

    @classmethod
    def fitted(cls, steps: Sequence[MeasuredStep]) -> StepModel:
        """The line with the least relative error. Raises ConfigError where steps are too few."""
        import numpy as np

        prompts = sum(each.shape.prompt_tokens > 0 for each in steps)
        if min(prompts, len(steps) - prompts) < _FEWEST:
            raise ConfigError(
                f"--steps: {prompts} steps with prompts and {len(steps) - prompts} without; expected "
                f"{_FEWEST} of each, as `millrace simulate --measure FILE` writes them"
            )
        features = np.array([_features(each.shape) for each in steps])
        seconds = np.array([each.seconds for each in steps])
        line = cls.of(_least_squares(features / seconds[:, None]))
        ratios = sorted(each.seconds / max(line.seconds(each.shape), 1e-9) for each in steps)
        cut = int(_TRIMMED * len(ratios))
        kept = ratios[cut : len(ratios) - cut]
        mean = math.fsum(kept) / len(kept)
        # What noise adds on average belongs to the line.
        return cls.of([term * mean for term in line.terms], tuple(each / mean for each in kept))

    @classmethod
    def of(cls, terms: Sequence[float], noise: tuple[float, ...] = (1.0,)) -> StepModel:
        """From the terms in their order."""
        step, answer, position, chunk, token, prompt_position = terms
        return cls(step, answer, position, chunk, token, prompt_position, noise)

    @property
    def terms(self) -> tuple[float, ...]:
        """All but the noise."""
        return self[:6]

    def slower(self, times: float) -> StepModel:
        """The same with every term so many times as long."""
        return StepModel.of([term * times for term in self.terms], self.noise)

    def resampled(self, steps: Sequence[MeasuredStep], seed: int) -> StepModel:
        """Fitted to as many of the steps, drawn with replacement: what another measurement might have said
        (the bootstrap).
        """
        return StepModel.fitted(random.Random(seed).choices(steps, k=len(steps))) if steps else self


def _features(shape: StepShape) -> tuple[float, ...]:
    has_prompt = shape.prompt_tokens > 0
    return (
        1.0,
        shape.num_answers,
        shape.answer_positions,
        float(has_prompt),
        shape.prompt_tokens,
        shape.prompt_positions,
    )


def _least_squares(features: object) -> list[float]:
    """Coefficients, none negative, that bring rows nearest to 1: the most negative are left out in turn."""
    import numpy as np

    matrix = np.asarray(features, dtype=float)
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0.0] = 1.0
    matrix = matrix / scale
    used = list(range(matrix.shape[1]))
    found = np.zeros(matrix.shape[1])
    while used:
        solved = np.linalg.lstsq(matrix[:, used], np.ones(len(matrix)), rcond=None)[0]
        worst = int(solved.argmin())
        if solved[worst] >= 0.0:
            found[used] = solved
            break
        used.pop(worst)
    return [float(value) for value in found / scale]


class StackCosts(msgspec.Struct, frozen=True):
    """What a running stack adds to an engine's own steps, as each of the requests tells by which it was
    asked: how many times as long steps take beside the other processes, and the seconds that a request and
    its first token spend outside the engine (`services.simulate.calibration`).
    """

    slowdowns: tuple[float, ...] = (1.0,)
    fronts_s: tuple[float, ...] = (0.0,)

    def for_seed(self, seed: int) -> tuple[float, float]:
        """Both medians; for a seed above 0 of as many values drawn with replacement (the bootstrap)."""
        drawn = random.Random(seed)

        def median(values: tuple[float, ...]) -> float:
            return statistics.median(drawn.choices(values, k=len(values)) if seed else values)

        return median(self.slowdowns), max(0.0, median(self.fronts_s))


class CalibratedRecord(StepRecord, frozen=True, kw_only=True):
    """An engine's steps and, where a stack was asked, what that adds."""

    stack_costs: StackCosts = StackCosts()


class EngineSetup(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of engine: what it is configured to, what fits into it, and how fast it is."""

    name: str
    model: StepModel
    scheduler: SchedulerConfig
    cache: CacheConfig
    memory: MemoryPlan
    attention_balance: float = math.inf
    speed: MeasuredSpeed = NOT_MEASURED
    # Seconds from its start to its readiness.
    load_s: float = 60.0
    # What it was fitted to.
    steps: tuple[MeasuredStep, ...] = ()
    stack_costs: StackCosts = StackCosts()
    # Seconds from a client to the engine and back, by `stack_costs`.
    front_s: float = 0.0

    def for_seed(self, seed: int) -> EngineSetup:
        """The same with another measurement's line and costs; those of seed 0 are what was measured."""
        model = self.model.resampled(self.steps, seed) if seed else self.model
        slowdown, front_s = self.stack_costs.for_seed(seed)
        return msgspec.structs.replace(self, model=model.slower(slowdown), front_s=front_s)


# About a model of 8 billion parameters in bfloat16 on one data-centre GPU: 6 ms to read its weights, 20
# microseconds of arithmetic for a token, 128 KiB of keys and values read at 3 TB/s for a position.
ASSUMED = StepModel(0.006, 0.00002, 4.3e-8, 0.0005, 0.00002, 2e-10)
_ASSUMED_BLOCKS, _ASSUMED_LEN = 16_384, 131_072


def assumed(scheduler: SchedulerConfig, cache: CacheConfig) -> EngineSetup:
    """An engine that nobody has measured."""
    return EngineSetup(
        name="assumed: 8 billion parameters on one data-centre GPU",
        model=ASSUMED,
        scheduler=scheduler,
        cache=cache,
        memory=MemoryPlan.of_counts(_ASSUMED_BLOCKS, cache.block_size, _ASSUMED_LEN),
        speed=speed_of(ASSUMED),
    )


def speed_of(model: StepModel) -> MeasuredSpeed:
    """What an engine with these steps measures before its first request."""
    prompt, short, together = 512, 32, 8

    def rate(shape: StepShape) -> float:
        seconds = model.seconds(shape)
        tokens = shape.prompt_tokens or shape.num_answers
        return tokens / seconds if seconds else 0.0

    return MeasuredSpeed(
        prompt_tokens_per_s=rate(StepShape(0, prompt, 0, prompt * prompt / 2)),
        prompt_tokens=prompt,
        short_prompt_tokens_per_s=rate(StepShape(0, short, 0, short * short / 2)),
        short_prompt_tokens=short,
        tokens_per_s_alone=rate(StepShape(1, 0, short, 0.0)),
        tokens_per_s_together=rate(StepShape(together, 0, together * short, 0.0)),
        num_together=together,
    )


def read_record(path: Path) -> EngineSetup:
    """The engine whose steps a file holds. Raises ConfigError, and OSError."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=CalibratedRecord)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--steps {path}: {error}; `millrace simulate --measure FILE` writes one"
        ) from error
    bad = next((each for each in record.steps if not 0 < each.seconds < math.inf), None)
    if bad is not None:
        raise ConfigError(f"--steps {path}: steps: a step of {bad.seconds} s; expected more than 0")
    balance = record.attention_balance
    return EngineSetup(
        name=f"{record.model} on {record.device}",
        model=StepModel.fitted(record.steps),
        scheduler=record.scheduler,
        cache=record.cache,
        memory=record.memory,
        attention_balance=math.inf if balance is None else balance,
        speed=record.speed,
        load_s=record.load_s,
        steps=record.steps,
        stack_costs=record.stack_costs,
    )
