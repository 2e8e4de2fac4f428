"""Speculation in virtual time: real scheduler, proposer and simulated engine, on a machine that is a formula.

The drafter knows the simulated engine's tokens and is right as often as it is told, by tenant. Clocks are
numbers, so a run is the same everywhere.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.config import CacheConfig, SchedulerConfig, SimulatedConfig
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.runner.simulated import SimulatedRunner
from engine.runner.speculation.economics import StepCost
from engine.runner.speculation.proposer import Proposer
from engine.scheduler import Scheduler
from engine.speculation_config import SpeculationConfig
from engine.types import Request, SamplingParams, SchedulerOutput, StepResult
from kernels.host import HOST
from tests.unit.engine.driver import memory_plan

VOCAB = 1_000


@dataclass(frozen=True)
class Machine:
    """Seconds of a step by its rows, as a share of `plain_s`: what every step takes, what each row adds, and
    what each begun group of rows adds.
    """

    base: float = 1.0
    row: float = 0.0
    group: float = 0.0
    group_rows: int = 16
    plain_s: float = 0.01
    # Of a look-up, or a round of a draft model.
    draft_s: float = 0.00002

    def with_draft_s(self, draft_s: float) -> Machine:
        """The same with another cost of proposing."""
        return dataclasses.replace(self, draft_s=draft_s)

    def seconds(self, num_rows: int) -> float:
        groups = -(-num_rows // self.group_rows)
        return self.plain_s * (self.base + self.row * num_rows + self.group * groups)


@dataclass
class Guesses:
    """See Drafter."""

    accuracy: dict[str, float]
    machine: Machine
    clock: Clock
    looks_up: bool = True
    keeps_steps: bool = False
    rows_beside: Sequence[int] = ()
    # Share of look-ups that find something.
    found: float = 1.0
    random: random.Random = field(default_factory=lambda: random.Random(1))

    def propose(
        self, states: Sequence[SequenceState], counts: Sequence[int], table: SequenceTable
    ) -> list[tuple[int, ...]]:
        rounds = len(states) if self.looks_up else max(counts)
        self.clock.now += rounds * self.machine.draft_s
        return [
            self.drafts_after(state, table.tokens[state.slot, : table.num_tokens[state.slot]], count)
            for state, count in zip(states, counts, strict=True)
        ]

    def saw(self, inputs: object, table: SequenceTable) -> None:
        """Steps have no hidden states."""

    def num_unread(self, state: SequenceState, table: SequenceTable) -> int:
        return int(table.num_tokens[state.slot]) - state.draft.num_read

    def drafts_after(self, state: SequenceState, text: NDArray[np.int64], count: int) -> tuple[int, ...]:
        # Looking back, it is quick.
        self.clock.now += self.machine.draft_s / 4
        if self.random.random() >= self.found:
            return ()
        accuracy = self.accuracy[state.owner[0]]
        right = [token_after(int(text[-1]), 1 + index) for index in range(count)]
        return tuple(token if self.random.random() < accuracy else 1 for token in right)

    def ended(self, state: SequenceState, output: NDArray[np.int64]) -> None:
        pass

    def learn(self, seconds: float) -> None:
        pass


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


SIMULATION = SimulatedConfig(vocab_size=VOCAB, first_token_id=300, last_token_id=VOCAB)


def token_after(token: int, steps: int) -> int:
    """The simulated engine counts on and on."""
    first, span = SIMULATION.first_token_id, SIMULATION.last_token_id - SIMULATION.first_token_id
    return first + (token - first + steps) % span


@dataclass
class Run:
    """What came of one, by sequence."""

    tenants: dict[int, str] = field(default_factory=dict)
    times_s: dict[int, list[float]] = field(default_factory=dict)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    num_drafted: int = 0
    num_accepted: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.outputs.values())) / self.seconds

    def of(self, tenant: str) -> list[list[float]]:
        return [times for each, times in self.times_s.items() if self.tenants[each] == tenant]

    def rate(self, tenant: str) -> float:
        """Tokens a second of the tenant's streams, each while it was there."""
        spans = [(len(times) - 1) / (times[-1] - times[0]) for times in self.of(tenant)]
        return sum(spans) / len(spans)

    def p99_gap(self, tenant: str, over: int = 1) -> float:
        """99th percentile of the seconds since the token `over` before, by the last token of each event."""
        gaps = [
            (times[at] - times[at - over]) / over
            for times in self.of(tenant)
            for at in range(over, len(times))
            if at + 1 == len(times) or times[at + 1] > times[at]
        ]
        return float(np.percentile(gaps, 99))


def run(
    machine: Machine,
    accuracy: dict[str, float],
    num_streams: int,
    *,
    method: str = "ngram",
    num_tokens: int = 400,
    num_turns: int = 2,
    **guesses: Any,
) -> Run:
    """Streams of the tenants in turns, each of so many requests one after another."""
    clock, engine, done = Clock(), SimulatedRunner(SIMULATION), Run()
    table = SequenceTable(vocab_size=VOCAB, max_model_len=4096, device=HOST, grammar=cast(Any, None))
    drafter = Guesses(accuracy, machine, clock, **guesses)
    config = SpeculationConfig(method=cast(Any, method))
    proposer = Proposer(config, None if method == "off" else drafter, clock=clock)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=num_streams, max_num_batched_tokens=2048),
        CacheConfig(prefix_caching=False),
        memory_plan(8192, 16, 4096),
        model="virtual",
    )
    tenants = list(accuracy)

    def ask(number: int) -> None:
        stream = number % num_streams
        done.tenants[number] = tenants[stream % len(tenants)]
        done.times_s[number], done.outputs[number] = [], []
        request = Request(
            request_id=number,
            external_id=str(number),
            prompt_token_ids=(300 + number, 301, 302),
            # Ends that are not all at once.
            sampling=SamplingParams(max_tokens=num_tokens + num_tokens // 10 * (stream % 5), ignore_eos=True),
            tenant=done.tenants[number],
        )
        scheduler.submit(request, clock.now)

    for number in range(num_streams):
        ask(number)
    while scheduler.has_work:
        plan = scheduler.schedule(clock.now)
        result = _step(plan, engine, table, proposer, clock, machine)
        done.num_drafted += sum(each.num_drafted for each in result.results)
        done.num_accepted += sum(each.num_accepted for each in result.results)
        scheduler.update(result, clock.now)
        for event in scheduler.drain_events():
            done.times_s[event.request_id] += [clock.now] * len(event.token_ids)
            done.outputs[event.request_id] += event.token_ids
            if event.finish_reason is not None and event.request_id < num_streams * (num_turns - 1):
                ask(event.request_id + num_streams)
    done.seconds = clock.now
    return done


def _step(
    plan: SchedulerOutput,
    engine: SimulatedRunner,
    table: SequenceTable,
    proposer: Proposer,
    clock: Clock,
    machine: Machine,
) -> StepResult:
    for each in plan.released:
        if each in table.states:
            proposer.ended(table.states[each], table)
        table.release(each)
    for new in plan.new_sequences:
        table.add(new)
    result = engine.launch(plan).wait()
    seconds = machine.seconds(plan.num_tokens) if plan.scheduled else 0.0
    clock.now += seconds
    drafted = [len(row.draft_token_ids) for row in plan.scheduled]
    decodes_only = all(
        row.samples and row.num_tokens == 1 + count
        for row, count in zip(plan.scheduled, drafted, strict=True)
    )
    economics, plain = proposer.economics, decodes_only and not any(drafted)
    rests = economics.passes(len(drafted)) or economics.rests(
        len(drafted), seconds, is_plain=plain, has_drafts=any(drafted)
    )
    states, indices = [], []
    for index, outcome in enumerate(result.results):
        if outcome.token_ids:
            state = table.states[outcome.sequence_id]
            table.append(state.slot, outcome.token_ids)
            proposer.judge(state, outcome.num_drafted, outcome.num_accepted)
            states.append(state)
            indices.append(index)
    if not states or rests:
        return result
    cost = StepCost(
        seconds=seconds,
        num_sequences=len(drafted),
        num_drafts=sum(drafted),
        num_accepted=sum(each.num_accepted for each in result.results),
        decodes_only=decodes_only,
    )
    found = proposer.propose(states, table, cost, num_in_flight=[0] * len(states))
    results = list(result.results)
    for index, drafts in zip(indices, found, strict=True):
        results[index] = msgspec.structs.replace(results[index], next_draft_token_ids=drafts)
    return msgspec.structs.replace(result, results=tuple(results))
