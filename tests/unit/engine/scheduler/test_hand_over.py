"""Hand-overs as the scheduler sees them: blocks held for others, and set apart for what others hold."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types import FinishReason
from engine.types.hand_over import BlockSource
from tests.unit.engine.checked_runner import expected_token
from tests.unit.engine.driver import Driver, memory_plan
from tests.unit.engine.pretend_disk import Entries, PretendPeers
from tests.unit.engine.scheduler.test_walk import FAST, OPERATIONS, Walk

PROMPT = list(range(1, 41))


def pair(entries: Entries, **options: object) -> Driver:
    driver = Driver(peers=PretendPeers(entries=entries), **options)  # type: ignore[arg-type]
    driver.disk_share = 1.0
    return driver


def held(driver: Driver) -> int:
    return driver.scheduler.num_total_blocks - driver.scheduler.num_unreferenced_blocks


def handed_over(entries: Entries) -> Driver:
    """A sender that holds the prompt under a ticket."""
    sender = pair(entries)
    request_id = sender.submit(PROMPT, max_tokens=9, hand_over=b"ticket")
    sender.run()
    # The options are those of the whole answer, of which it draws one token.
    assert len(sender.tokens(request_id)) == 1
    assert sender.finish(request_id) is FinishReason.LENGTH
    sender.disk.work()  # type: ignore[union-attr]
    return sender


def test_a_prompt_is_held_until_it_is_let_go_or_its_time_is_over() -> None:
    sender = handed_over({})
    assert held(sender) == 10
    assert sender.scheduler.next_deadline_s() is not None
    sender.scheduler.release(b"ticket")
    sender.scheduler.release(b"ticket")
    assert held(sender) == 0
    late = handed_over({})
    late.wait(1.1)
    late.step()
    assert held(late) == 0
    assert late.disk.offered == {}  # type: ignore[union-attr]


def test_no_more_than_a_share_is_held() -> None:
    sender = pair({}, memory=memory_plan(19))
    sender.submit(PROMPT, max_tokens=9, hand_over=b"ticket")
    sender.run()
    assert held(sender) == 0


def test_the_answer_goes_on_from_what_was_pulled() -> None:
    entries: Entries = {}
    sender = handed_over(entries)
    receiver = pair(entries)
    first = sender.tokens(1)
    request_id = receiver.submit(
        PROMPT, max_tokens=9, output_token_ids=tuple(first), source=BlockSource("a:1", b"ticket")
    )
    receiver.run()
    assert [*first, *receiver.tokens(request_id)] == [expected_token(PROMPT, 0, 0, each) for each in range(9)]
    # The whole prompt came: its last token's block is full.
    assert receiver.runner.num_computed_tokens == 8
    receiver.check_everything()


def test_a_cancel_gives_back_what_was_set_apart() -> None:
    receiver = pair({})
    receiver.disk_share = 0.0
    request_id = receiver.submit(PROMPT, source=BlockSource("a:1", b"ticket"))
    receiver.step()
    assert held(receiver) == 9
    receiver.cancel(request_id)
    receiver.step()
    assert held(receiver) == 0
    assert receiver.tokens(request_id) == []


class HandingOver(Walk):
    """Some requests hand over, some have a source."""

    def _submit(self, prompt: list[int], n: int = 1, priority: int = 0) -> None:
        rng, submit = self.random, self.driver.submit
        fields: dict[str, object] = {}
        if n == 1 and rng.random() < 0.5:
            fields = (
                {"source": BlockSource("a:1", b"x")}
                if rng.random() < 0.5
                else {"hand_over": rng.randbytes(16)}
            )
        self.driver.submit = lambda *given, **more: submit(*given, **{**more, **fields})  # type: ignore[method-assign]
        super()._submit(prompt, n, priority)
        self.driver.submit = submit  # type: ignore[method-assign]

    def _retention(self) -> None:
        return None


@settings(max_examples=40, deadline=None, phases=FAST)
@given(
    seed=st.integers(0, 1 << 30),
    operations=st.lists(st.sampled_from((*OPERATIONS, "release")), min_size=5, max_size=50),
    overlap=st.booleans(),
    faults=st.booleans(),
    num_blocks=st.sampled_from((34, 48, 200)),
    num_host_blocks=st.sampled_from((0, 16)),
)
def test_walks_over_engines_that_hand_over(
    seed: int, operations: list[str], overlap: bool, faults: bool, num_blocks: int, num_host_blocks: int
) -> None:
    entries: Entries = {}
    for life in range(2):
        peers = PretendPeers(seed + life, entries)
        walk = HandingOver(
            seed + life,
            faults=faults,
            memory=memory_plan(num_blocks),
            overlap=overlap,
            num_host_blocks=num_host_blocks,
            peers=peers,
        )
        for operation in operations:
            if operation == "release" and peers.offered:
                walk.driver.scheduler.release(random.Random(seed).choice(sorted(peers.offered)))
            walk.operate(operation)
        walk.driver.run()
        walk.driver.wait(1.1)
        walk.driver.step()
        assert peers.offered == {}
        walk.finish()
