"""A fleet of many engines: few of them are compared, and few of their blocks are known."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.engines import BlocksStored, EngineLoad
from contract.errors import MillraceError
from contract.sampling import SamplingParams
from engine.config import CacheConfig, SchedulerConfig
from engine.service.neighbours import HeldBlocks, sampled
from gateway.config import RoutingConfig
from gateway.engines.attachment import Attachment
from gateway.engines.fleet import Fleet, home_of
from gateway.engines.prefix import PrefixIndex, PromptHashes
from gateway.engines.types import EngineState, Submission
from services.simulate.fleet import Clock, EngineNode, VirtualAttachment, drive
from services.simulate.step_model import assumed

_SETUP = assumed(SchedulerConfig(), CacheConfig())
_FULL = EngineLoad(num_running=100, pending_prefill_tokens=90_000, num_free_blocks=1, num_total_blocks=100)


def fleet_of(num_engines: int, **routing: int) -> Fleet:
    """So many engines, which are ready and idle."""
    fleet = Fleet(gateway="one", routing=RoutingConfig(**routing), attachment=VirtualAttachment)  # type: ignore[arg-type]
    nodes = [EngineNode(index, 0, _SETUP, Clock(), 1, skips=True) for index in range(num_engines)]
    drive(fleet.set_targets([node.target for node in nodes]))
    for attachment, node in zip(fleet.attachments, nodes, strict=True):
        assert isinstance(attachment, VirtualAttachment)
        attachment.connect(node)
    return fleet


def tell(fleet: Fleet, target: str, load: EngineLoad, blocks: tuple[int, ...] = ()) -> None:
    attachment = next(each for each in fleet.attachments if each.target == target)
    assert isinstance(attachment, VirtualAttachment)
    attachment.report(load, [BlocksStored(blocks)] if blocks else [])


def asks(number: int = 0, affinity: str = "") -> Submission:
    return Submission(
        context=None,
        prompt_token_ids=tuple(range(number, number + 200)),
        sampling=SamplingParams(),
        model="model",
        checkpoint="model",
        affinity=affinity,
    )


def hashes_of(submission: Submission) -> PromptHashes:
    ids, block_size = submission.prompt_token_ids, _SETUP.memory.block_size
    return PromptHashes(ids, model="model", adapter="", salt=b"", block_size=block_size)


def test_who_holds_the_prompt_is_found_among_many() -> None:
    fleet = fleet_of(300, max_candidates=8)
    for number in range(20):
        holder, asked = f"engine-{number * 13}:50071", asks(number)
        hashes = hashes_of(asked)
        tell(fleet, holder, EngineLoad(), tuple(hashes.at(index) for index in range(hashes.num_blocks)))
        route = fleet.pick(asked)
        assert (route.attachment.target, route.prefix_tokens) == (holder, hashes.num_blocks * 16)


def test_among_many_that_are_full_the_idle_are_chosen() -> None:
    fleet = fleet_of(200, max_candidates=32)
    idle = {f"engine-{index}:50071" for index in range(0, 200, 2)}
    for attachment in list(fleet.attachments):
        if attachment.target not in idle:
            tell(fleet, attachment.target, _FULL)
    chosen = {fleet.pick(asks(1000 * number)).attachment.target for number in range(100)}
    assert chosen <= idle
    # By chance, and not the same few.
    assert len(chosen) > 40


def test_a_prompt_cache_key_leads_to_the_same_engine_for_every_gateway() -> None:
    one, other, fewer = fleet_of(40, max_candidates=8), fleet_of(40), fleet_of(39)
    keys = [f"key {number}" for number in range(400)]

    def homes(fleet: Fleet) -> list[str]:
        # Nothing is open there, and nothing is known: the key alone decides.
        return [_home(asks(affinity=key), fleet.takers(asks())) for key in keys]

    def _home(submission: Submission, takers: list[Attachment]) -> str:
        found = home_of(submission, takers)
        assert found is not None
        return found.target

    assert homes(one) == homes(other)
    assert one.pick(asks(affinity=keys[0])).attachment.target == homes(one)[0]
    # Keys of those that stay do not move, and none has far more than its share.
    lost = "engine-39:50071"
    moved = [(was, now) for was, now in zip(homes(other), homes(fewer), strict=True) if was != now]
    assert {was for was, _ in moved} == {lost}
    assert max(Counter(homes(other)).values()) <= 25


def test_what_takes_requests_follows_every_change() -> None:
    fleet = fleet_of(3)
    assert len(fleet.takers(asks())) == 3
    tell(fleet, "engine-1:50071", EngineLoad(draining=True))
    assert [each.state for each in fleet.takers(asks())] == [EngineState.READY] * 2
    tell(fleet, "engine-1:50071", EngineLoad())
    assert len(fleet.takers(asks())) == 3
    for attachment in list(fleet.attachments):
        assert isinstance(attachment, VirtualAttachment)
        attachment.disconnect()
    with pytest.raises(MillraceError, match="no engine takes requests"):
        fleet.pick(asks())
    drive(fleet.set_targets([]))
    assert fleet.takers(asks()) == []


hashes = st.lists(st.integers(1, 2**64 - 1), min_size=1, max_size=80, unique=True)


@given(st.integers(0, 1000), st.integers(1, 16), st.integers(0, 12))
def test_a_prefix_is_known_up_to_its_last_block_that_is_heard_of(start: int, sample: int, held: int) -> None:
    prompt = hashes_of(asks(start))
    stored = [prompt.at(index) for index in range(min(held, prompt.num_blocks))]
    index = PrefixIndex(sample)
    index.apply([BlocksStored(tuple(stored))] if stored else [])
    heard = [number for number, block_hash in enumerate(stored) if block_hash % sample == 0]
    assert index.num_cached_blocks(prompt) == (heard[-1] + 1 if heard else 0)
    known = [prompt.at(each) for each in range(prompt.num_blocks) if prompt.at(each) % sample == 0]
    first = prompt.first_sampled(sample)
    assert first == (known[0] if known else None)
    assert (first is not None and index.holds(first)) == bool(known and known[0] in stored)


@given(st.integers(0, 1000), st.lists(st.integers(1, 16), min_size=2, max_size=4))
def test_the_first_block_that_is_known_is_that_of_each_sample_asked(start: int, samples: list[int]) -> None:
    prompt = hashes_of(asks(start))
    blocks = [prompt.at(index) for index in range(prompt.num_blocks)]
    for sample in samples:
        assert prompt.first_sampled(sample) == next((each for each in blocks if each % sample == 0), None)


@given(hashes, st.integers(1, 8))
def test_an_engine_tells_what_a_gateway_keeps(stored: list[int], sample: int) -> None:
    held = HeldBlocks()
    held.apply([BlocksStored(tuple(stored))])
    told = [each for event in sampled(held.snapshot(), sample) for each in event.block_hashes]
    assert told == [each for each in stored if each % sample == 0]
