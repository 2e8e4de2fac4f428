"""What a running stack adds to its engine's steps: other processes on the same processors, and the way there.

A load of its own goes to the stack, and the same arrivals are simulated with the steps that the engine
measured alone. Steps are as many times longer as answers took longer for each token, found by repetition,
since slower steps hold more answers; what first tokens then still lack is the front.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gateway.config import GatewayConfig
from gateway.tiers import Tiers
from runtime.errors import ConfigError
from services.bench.client import BenchTarget
from services.bench.records import RequestRecord
from services.bench.run import choose_model, run_workload
from services.bench.workload import Arrivals, Lengths, Workload
from services.simulate.arrivals import ArrivingRequest
from services.simulate.scenario import Scenario
from services.simulate.step_model import CalibratedRecord, EngineSetup, StackCosts, read_record

# Part of an engine that the load fills, the answers that share a step then, and its requests.
_FILLED = 0.5
_TOGETHER = 8
_NUM_REQUESTS = 60
# Another seed than a load's own: prompts that are the same would be found in the stack's cache.
_SEED = 7_001
# Repetitions of the simulation, each with the slowdown that the one before it found.
_REPETITIONS = 6
# Slowdowns that are believed.
_LEAST, _MOST = 0.2, 20.0


def filling(
    setup: EngineSetup, prompt: Lengths, answer: Lengths, part: float, *, burstiness: float = 1.0
) -> Arrivals:
    """How requests of these lengths come that fill this part of one engine."""
    prompt_tokens, answer_tokens = prompt.low, answer.low
    model = setup.model
    token_s = model.answers_s(_TOGETHER, int(_TOGETHER * prompt_tokens)) / _TOGETHER
    work_s = model.chunk_s + prompt_tokens * model.prompt_token_s + answer_tokens * token_s
    return Arrivals(rate=part / work_s, burstiness=burstiness)


def calibrating_load(setup: EngineSetup) -> Workload:
    """Requests of many lengths that fill half of an engine."""
    prompt, answer = Lengths.parse("lognormal:160:0.6"), Lengths.parse("lognormal:40:0.5")
    return Workload(
        num_requests=_NUM_REQUESTS,
        arrivals=filling(setup, prompt, answer, _FILLED),
        input_tokens=prompt,
        output_tokens=answer,
        seed=_SEED,
    )


def arrivals_of(records: Sequence[RequestRecord], tier: str = "") -> tuple[ArrivingRequest, ...]:
    """The requests as they came to the stack, with the tokens that it counted."""
    first_s = min(each.start_s for each in records)
    return tuple(
        ArrivingRequest(each.start_s - first_s, each.prompt_tokens, each.completion_tokens, tier)
        for each in sorted(records, key=lambda record: record.start_s)
    )


async def calibrated(
    target: BenchTarget, setup: EngineSetup, config: GatewayConfig, tiers: Tiers, tier: str = ""
) -> StackCosts:
    """Asks the stack. Raises ConfigError where it does not answer every request."""
    model = await choose_model(target, "")
    load = calibrating_load(setup)
    records, _ = await run_workload(target, load, model, num_warmup=1, on_progress=lambda record: None)
    failed = next((each for each in records if not each.ok), None)
    if failed is not None:
        raise ConfigError(
            f"--calibrate: a request failed with status {failed.status}: {failed.error or 'no output'}; "
            "expected a stack that answers all"
        )
    return fitted(records, setup, config, tiers, tier)


def fitted(
    records: Sequence[RequestRecord],
    setup: EngineSetup,
    config: GatewayConfig,
    tiers: Tiers,
    tier: str = "",
) -> StackCosts:
    """From what the stack's clients saw. Raises ConfigError where that is no slowdown that could be meant."""
    ordered = sorted(records, key=lambda record: record.start_s)
    load, slowdown, front_s = arrivals_of(records, tier), 1.0, 0.0
    slowdowns: list[float] = []
    fronts_s: list[float] = []
    for _ in range(_REPETITIONS):
        costs = StackCosts((slowdown,), (front_s,))
        slowed = msgspec.structs.replace(setup, stack_costs=costs, steps=())
        scenario = Scenario(load=load, setup=slowed, config=config, tiers=tiers, objectives={})
        served = scenario.served(1, 0).served
        slowdowns = [
            slowdown * _tpot_s(record) / each.tpot_s
            for record, each in zip(ordered, served, strict=True)
            if each.num_tokens > 1 and len(record.chunk_times_s) > 1
        ]
        fronts_s = [
            front_s + record.ttft_s - each.ttft_s for record, each in zip(ordered, served, strict=True)
        ]
        if not slowdowns:
            raise ConfigError("--calibrate: no request was answered with two tokens or more")
        slowdown, front_s = statistics.median(slowdowns), max(0.0, statistics.median(fronts_s))
        if not _LEAST <= slowdown <= _MOST:
            raise ConfigError(
                f"--calibrate: the stack's steps take {slowdown:.2g} times as long as --steps says; expected "
                f"{_LEAST:g} to {_MOST:g}: is it the same model on the same machine?"
            )
    return StackCosts(tuple(slowdowns), tuple(fronts_s))


def _tpot_s(record: RequestRecord) -> float:
    times = record.chunk_times_s
    return (times[-1] - times[0]) / max(1, record.completion_tokens - 1)


def write(path: Path, stack_costs: StackCosts) -> None:
    """Into the record of the steps. Raises ConfigError, and OSError."""
    read_record(path)
    record = msgspec.json.decode(path.read_bytes(), type=CalibratedRecord)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(record, stack_costs=stack_costs)))
