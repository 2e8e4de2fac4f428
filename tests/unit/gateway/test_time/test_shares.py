"""64 requests that think longer beside others' chats: real strategies, the real scheduler, virtual time.

That a sample is to an engine a submission of its request's tenant is what the other tests of this room hold.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec
import pytest

from benchmarks.engine.report import percentile
from benchmarks.engine.virtual import Arrival, Device, Outcome, Served, poisson, simulate
from engine.config import SchedulerConfig
from gateway.test_time.search import StepSearch
from gateway.test_time.strategies import BestSample, Decision, Sample, SelfConsistency, Strategy

NUM_REQUESTS, SAMPLES = 64, 8
CONFIG = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=32, max_waiting=100_000)
# As config/millrace.toml has them for its fast tier.
TTFT_S, TPOT_S = 0.5, 0.06
PROMPT, TOKENS, STEP_TOKENS, NUM_LEVELS = 64, 128, 32, 4
WAYS: tuple[Callable[[], Strategy], ...] = (
    lambda: BestSample(SAMPLES),
    lambda: SelfConsistency(SAMPLES, 0.95),
    lambda: StepSearch(SAMPLES, rates=False),
)


@dataclasses.dataclass(frozen=True)
class Branch(Arrival):
    """A sample of a request that thinks longer, or a step of it at a level."""

    index: int = 0
    level: int = 0


class Thinker:
    """One request: what becomes of its samples is drawn, and what begins is its strategy's decision."""

    def __init__(self, number: int, weight: float) -> None:
        self._number, self._weight = number, weight
        self._strategy = WAYS[number % len(WAYS)]()
        self._rng = random.Random(number)
        self._levels: list[int] = []
        self.last = self._strategy.begin()

    def begin(self) -> Iterable[Branch]:
        """Its first samples."""
        return self._branches(self.last, 0.0)

    def ended(self, branch: Branch, now_s: float) -> Iterable[Branch]:
        """What begins when one of its samples has ended."""
        is_step = isinstance(self._strategy, StepSearch) and branch.level < NUM_LEVELS - 1
        self.last = self._strategy.take(
            Sample(
                index=branch.index,
                is_complete=not is_step,
                is_step=is_step,
                num_tokens=branch.max_tokens,
                mean_logprob=-self._rng.random(),
                vote=self._rng.choice("aaab"),
            )
        )
        return [] if self.last.ended_by else self._branches(self.last, now_s)

    def _branches(self, step: Decision, now_s: float) -> Iterable[Branch]:
        searches = isinstance(self._strategy, StepSearch)
        for place in range(step.start):
            level = self._levels[step.parents[place]] + 1 if step.parents else 0
            self._levels.append(level)
            yield Branch(
                now_s,
                PROMPT + level * STEP_TOKENS,
                STEP_TOKENS if searches else TOKENS,
                "thinker",
                "thinker",
                weight=self._weight,
                prompt=self._number,
                index=len(self._levels) - 1,
                level=level,
            )


def run(chats: list[Arrival], *, num_thinkers: int, stop_s: float | None = None, **fields: float) -> Outcome:
    """Chats, and requests that think longer and come at once; `fields` are those of Thinker."""
    thinkers = [Thinker(number, fields.get("weight", 1.0)) for number in range(num_thinkers)]

    def follows(one: Served) -> Iterable[Arrival]:
        if isinstance(one.arrival, Branch):
            assert one.arrival.prompt is not None
            return thinkers[one.arrival.prompt].ended(one.arrival, one.ended_s)
        return ()

    first = [branch for each in thinkers for branch in each.begin()]
    config = msgspec.structs.replace(CONFIG, aging_s=1e9)
    outcome = simulate([*chats, *first], config, Device(), stop_s=stop_s, follows=follows)
    if stop_s is None:
        assert all(each.last.winner is not None for each in thinkers)
    return outcome


def chat(at_s: float, tenant: str) -> Arrival:
    # Without a deadline, by which it would pass others in any case.
    return Arrival(at_s, PROMPT, TOKENS, "chat", tenant)


def late(outcome: Outcome) -> tuple[float, float]:
    """The 99th percentile of others' first tokens and of the time for each further one."""
    chats = outcome.of("chat")
    firsts, others = [each.ttft_s for each in chats], [each.tpot_s for each in chats]
    assert None not in firsts, "every chat has begun"
    return percentile(list(filter(None, firsts)), 0.99), percentile(list(filter(None, others)), 0.99)


def test_others_chats_stay_within_their_targets_and_have_what_they_have_alone() -> None:
    rng = random.Random(5)
    chats = [chat(at_s, f"tenant {index % 8}") for index, at_s in enumerate(poisson(rng, 4, 10.0))]
    beside = run(chats, num_thinkers=NUM_REQUESTS)
    thinks_s = max(each.ended_s for each in beside.of("thinker"))
    assert thinks_s > chats[-1].at_s, "they think all the time"
    ttft_s, tpot_s = late(beside)
    assert ttft_s <= TTFT_S
    assert tpot_s <= TPOT_S
    alone = run(chats, num_thinkers=0)
    for with_others, without in zip(beside.of("chat"), alone.of("chat"), strict=True):
        assert len(with_others.token_times_s) == len(without.token_times_s) == TOKENS
    # Of the tenant whose requests think, they would wait behind these.
    together = [dataclasses.replace(each, tenant="thinker") for each in chats]
    assert late(run(together, num_thinkers=NUM_REQUESTS))[0] > TTFT_S


@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (3.0, 0.75)])
def test_samples_count_for_their_tenant_whose_share_is_its_weights(weight: float, share: float) -> None:
    """Of two tenants with more than can be served, whatever the one's requests are made of."""
    chats = [chat(0.0, "chats") for _ in range(400)]
    outcome = run(chats, num_thinkers=NUM_REQUESTS, stop_s=5.0, weight=weight)
    served: Counter[str] = Counter()
    for each in outcome.served:
        served[each.arrival.tenant] += len(each.token_times_s)
    assert served["thinker"] / served.total() == pytest.approx(share, abs=0.05)
