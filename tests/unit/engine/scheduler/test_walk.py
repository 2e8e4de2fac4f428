"""Random walks: whatever is submitted, cancelled, failed and preempted, the books stay whole."""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from contract.retention import Retention
from tests.unit.engine.checked_runner import State, expected_token
from tests.unit.engine.driver import Driver, memory_plan

OPERATIONS = (
    "submit",
    "submit_shared",
    "submit_n",
    "submit_high",
    "cancel",
    "step",
    "step",
    "step",
    "wait",
    "fail",
)


# Shrinking a walk takes minutes and the seed alone reproduces it.
FAST = (Phase.explicit, Phase.reuse, Phase.generate)

# Of the model, in tokens; blocks have four. None keeps every block.
WINDOWS = st.sampled_from((None, 1, 6, 24))
# The same where only some layers have one, with their blocks: at least those that one sequence needs; and
# whether memory goes from these to the others and back.
PARTIAL = st.sampled_from(
    (
        *((0, 0, False), (0, 0, False), (1, 4, False), (6, 5, False), (6, 12, False), (10, 30, False)),
        *((24, 9, False), (24, 40, False), (1, 4, True), (6, 5, True), (10, 30, True), (24, 12, True)),
    )
)
# Slots for states, of which eight are for sequences that run; none where layers only attend.
STATES = st.sampled_from((0, 9, 12, 40))


class Walk:
    """Random operations on one driver."""

    def __init__(self, seed: int, *, faults: bool, **options: object) -> None:
        self.random = random.Random(seed)
        self.driver = Driver(**options)  # type: ignore[arg-type]
        self.faults = faults
        self.fail_next = False
        # Whether some answers forget, as they may where layers keep all.
        self.forgets = self.driver.scheduler._state.cache.window is None and not self.driver.memory.num_states
        self.driver.runner.fault = self._fault
        if self.random.random() < 0.3:
            self.driver.runner.propose = self._propose

    def _fault(self, plan: object) -> str:
        failing, self.fail_next = self.fail_next, False
        return "injected" if failing else ""

    def _propose(self, state: State) -> tuple[int, ...]:
        count = self.random.randrange(4)
        right = [300 + (state.tokens[-1] - 300 + step) % 700 for step in range(1, count + 1)]
        if right and self.random.random() < 0.5:
            right[self.random.randrange(count)] = 7
        return tuple(right)

    def operate(self, operation: str) -> None:
        rng, driver = self.random, self.driver
        if operation == "submit":
            self._submit([rng.randrange(300) for _ in range(rng.randrange(1, 60))])
        elif operation == "submit_shared":
            prefix = [1 + rng.randrange(2)] * 24
            self._submit(prefix + [rng.randrange(300) for _ in range(rng.randrange(1, 12))])
        elif operation == "submit_n":
            self._submit([rng.randrange(300) for _ in range(rng.randrange(1, 20))], n=rng.randrange(2, 5))
        elif operation == "submit_high":
            self._submit([rng.randrange(300) for _ in range(rng.randrange(1, 40))], priority=10)
        elif operation == "cancel" and driver.scheduler.num_requests:
            driver.cancel(
                rng.choice(sorted(driver.scheduler._state.groups.keys() & driver.events.keys()) or [0])
            )
        elif operation == "wait":
            driver.wait(rng.random() * 3)
        elif operation == "fail" and self.faults:
            self.fail_next = True
        else:
            driver.step()

    def _submit(self, prompt: list[int], n: int = 1, priority: int = 0) -> None:
        rng = self.random
        deadline = self.driver.now + rng.random() * 5 if rng.random() < 0.1 else None
        continued = n == 1 and rng.random() < 0.1
        seed = rng.randrange(5)
        retention = self._retention()
        num_tokens = rng.randrange(3, 40)
        if retention is not None and retention.outlives_positions and rng.random() < 0.3:
            num_tokens += 200
        num_known = rng.choice((2, num_tokens - 1)) if continued and num_tokens > 40 else 2 * continued
        output = tuple(expected_token(tuple(prompt), seed, 0, i) for i in range(num_known))
        self.driver.submit(
            prompt,
            max_tokens=num_tokens,
            n=n,
            seed=seed,
            priority=priority,
            tenant=rng.choice("abc"),
            deadline_s=deadline,
            ttft_deadline_s=self.driver.now + rng.random() if rng.random() < 0.5 else None,
            tpot_target_s=rng.choice((None, 0.001, 0.012, 0.1)),
            output_token_ids=output,
            retention=retention,
        )

    def _retention(self) -> Retention | None:
        if not self.forgets or self.random.random() < 0.5:
            return None
        policy = self.random.choice(("window+sinks", "snapkv", "h2o"))
        if self.random.random() < 0.5:
            return Retention(policy=policy, keep=self.random.choice((0.1, 0.5, 1.0)))
        return Retention(policy=policy, window_tokens=self.random.randrange(1, 40))

    def finish(self) -> None:
        self.fail_next = False
        self.driver.run()
        self.driver.check_everything()


@settings(max_examples=60, deadline=None, phases=FAST)
@given(
    seed=st.integers(0, 1 << 30),
    operations=st.lists(st.sampled_from(OPERATIONS), min_size=5, max_size=60),
    overlap=st.booleans(),
    prefix_caching=st.booleans(),
    num_blocks=st.sampled_from((34, 48, 200)),
    num_host_blocks=st.sampled_from((0, 0, 8, 40)),
    window=WINDOWS,
    partial=PARTIAL,
    num_states=STATES,
)
def test_any_walk_keeps_the_books(
    seed: int,
    operations: list[str],
    overlap: bool,
    prefix_caching: bool,
    num_blocks: int,
    num_host_blocks: int,
    window: int | None,
    partial: tuple[int, int, bool],
    num_states: int,
) -> None:
    if partial[0]:
        window, num_host_blocks = None, 0
    walk = Walk(
        seed,
        faults=False,
        memory=memory_plan(
            num_blocks,
            num_states=num_states,
            window=partial[0],
            num_window_blocks=partial[1],
            moves=partial[2],
        ),
        overlap=overlap,
        prefix_caching=prefix_caching,
        num_host_blocks=num_host_blocks,
        window=window,
    )
    for operation in operations:
        walk.operate(operation)
    walk.finish()


@settings(max_examples=40, deadline=None, phases=FAST)
@given(
    seed=st.integers(0, 1 << 30),
    operations=st.lists(st.sampled_from(OPERATIONS), min_size=5, max_size=60),
    overlap=st.booleans(),
    num_host_blocks=st.sampled_from((0, 16)),
    window=WINDOWS,
    partial=PARTIAL,
    num_states=STATES,
)
def test_walks_with_failing_steps_end_every_request(
    seed: int,
    operations: list[str],
    overlap: bool,
    num_host_blocks: int,
    window: int | None,
    partial: tuple[int, int, bool],
    num_states: int,
) -> None:
    if partial[0]:
        window, num_host_blocks = None, 0
    walk = Walk(
        seed,
        faults=True,
        memory=memory_plan(
            40, num_states=num_states, window=partial[0], num_window_blocks=partial[1], moves=partial[2]
        ),
        overlap=overlap,
        num_host_blocks=num_host_blocks,
        window=window,
    )
    for operation in operations:
        walk.operate(operation)
    walk.finish()


@settings(max_examples=15, deadline=None, phases=FAST)
@given(
    seed=st.integers(0, 1 << 30),
    max_preemptions=st.integers(1, 4),
    num_blocks=st.sampled_from((20, 26, 40)),
    watermark=st.sampled_from((0.0, 0.1)),
    overlap=st.booleans(),
    window=WINDOWS,
    partial=PARTIAL,
    # How many of the answers do, where layers keep all.
    forgets=st.sampled_from((0.0, 0.5, 1.0)),
)
def test_preemption_storms_are_impossible(
    seed: int,
    max_preemptions: int,
    num_blocks: int,
    watermark: float,
    overlap: bool,
    window: int | None,
    partial: tuple[int, int, bool],
    forgets: float,
) -> None:
    # Far more than fits, of two tiers, all growing to their limit.
    rng = random.Random(seed)
    window = None if partial[0] else window
    driver = Driver(
        memory=memory_plan(
            num_blocks, 4, 76, window=partial[0], num_window_blocks=partial[1], moves=partial[2]
        ),
        overlap=overlap,
        watermark=watermark,
        max_preemptions=max_preemptions,
        window=window,
    )
    for _ in range(12):
        length = rng.randrange(1, 20)
        kv = None
        if window is None and not partial[0] and rng.random() < forgets:
            kv = Retention(policy="window+sinks", window_tokens=rng.randrange(1, 50))
        prompt = [rng.randrange(99) for _ in range(length)]
        # Some go on beyond the model's positions, again and again.
        num_tokens = 50 if kv is None else rng.choice((50, 220))
        driver.submit(prompt, max_tokens=num_tokens, priority=rng.randrange(2), retention=kv)
        for _ in range(rng.randrange(6)):
            driver.step()
    driver.run()
    driver.check_everything()
    ends = {
        request: event.statistics
        for request, events in driver.events.items()
        for event in events
        if event.statistics
    }
    assert len(ends) == 12
    assert max(each.num_preemptions for each in ends.values()) <= max_preemptions
    # Work done twice is bounded by what a preemption can cost, and what an answer takes along.
    computed, asked = driver.runner.num_computed_tokens, driver.requests
    each_alone = {request: 75 if asked[request].sampling.max_tokens == 50 else 2 * 240 for request in ends}
    assert computed <= sum(each_alone[request] + 75 * each.num_preemptions for request, each in ends.items())


@pytest.mark.parametrize(
    ("num_operations", "overlap", "window", "num_states", "partial"),
    [
        (3000, False, 10, 0, (0, 0, False)),
        (3000, True, None, 14, (0, 0, False)),
        (3000, True, 10, 0, (0, 0, False)),
        (3000, False, None, 0, (10, 24, False)),
        (3000, False, None, 0, (10, 24, True)),
        (3000, True, None, 0, (24, 12, True)),
        (3000, True, None, 14, (10, 24, False)),
        (3000, True, None, 14, (10, 24, True)),
    ],
)
def test_thousands_of_operations_with_failures(
    num_operations: int, overlap: bool, window: int | None, num_states: int, partial: tuple[int, int, bool]
) -> None:
    memory = memory_plan(
        60, num_states=num_states, window=partial[0], num_window_blocks=partial[1], moves=partial[2]
    )
    num_host_blocks = 0 if partial[0] else 20
    walk = Walk(
        7, faults=True, memory=memory, overlap=overlap, num_host_blocks=num_host_blocks, window=window
    )
    for _ in range(num_operations):
        busy = walk.driver.scheduler.num_requests > 40
        walk.operate("step" if busy else walk.random.choice(OPERATIONS))
    walk.finish()
    assert len(walk.driver.requests) > num_operations / 10


@settings(max_examples=40, deadline=None, phases=FAST)
@given(
    seed=st.integers(0, 1 << 30),
    num_operations=st.integers(5, 60),
    overlap=st.booleans(),
    num_blocks=st.sampled_from((34, 48, 200)),
    num_host_blocks=st.sampled_from((0, 16)),
    by_deadline=st.booleans(),
    window=WINDOWS,
    partial=PARTIAL,
)
def test_ending_requests_frees_everything_within_one_step(
    seed: int,
    num_operations: int,
    overlap: bool,
    num_blocks: int,
    num_host_blocks: int,
    by_deadline: bool,
    window: int | None,
    partial: tuple[int, int, bool],
) -> None:
    """At any point of any walk: blocks at once, the runner's states (grammars with them) with the next plan,
    host blocks that were being read with it as well.
    """
    if partial[0]:
        window, num_host_blocks = None, 0
    walk = Walk(
        seed,
        faults=False,
        memory=memory_plan(num_blocks, window=partial[0], num_window_blocks=partial[1], moves=partial[2]),
        overlap=overlap,
        num_host_blocks=num_host_blocks,
        window=window,
    )
    driver = walk.driver
    cache = driver.scheduler._state.cache
    for _ in range(num_operations):
        walk.operate(walk.random.choice(OPERATIONS))
    last = driver.submit([1] * 9, max_tokens=9, deadline_s=driver.now + 1.0 if by_deadline else None)
    if by_deadline:
        others = [each for each in list(driver.scheduler._state.groups) if each != last]
        for request_id in others:
            driver.cancel(request_id)
        driver.wait(1.5)
    else:
        for request_id in list(driver.scheduler._state.groups):
            driver.cancel(request_id)
        assert driver.scheduler.num_unreferenced_blocks == cache.num_present
    driver.step()
    assert driver.scheduler.num_unreferenced_blocks == cache.num_present
    assert cache.num_available_window_blocks == cache.num_present_window_blocks
    if not partial[2]:
        assert (cache.num_present, cache.num_present_window_blocks) == (num_blocks, partial[1])
    assert driver.scheduler.num_requests == 0
    assert driver.runner.num_states() == 0
    driver.run()
    assert driver.scheduler._state.cache._host._reading == []
