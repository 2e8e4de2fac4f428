"""What a gateway that attaches late is told of the prefix cache."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.service.neighbours import HeldBlocks
from engine.types import BlocksEvicted, BlocksStored, KvEvent


@given(
    st.lists(
        st.one_of(
            st.builds(
                BlocksStored,
                st.lists(st.integers(1, 40), min_size=1, max_size=6, unique=True).map(tuple),
                st.integers(0, 40),
            ),
            st.builds(BlocksEvicted, st.lists(st.integers(1, 40), max_size=6).map(tuple)),
        ),
        max_size=30,
    )
)
def test_a_snapshot_leads_to_the_same_set_as_all_events(events: list[KvEvent]) -> None:
    held = HeldBlocks()
    held.apply(events)
    expected: set[int] = set()
    for event in events:
        if isinstance(event, BlocksStored):
            expected |= set(event.block_hashes)
        else:
            expected -= set(event.block_hashes)
    again = HeldBlocks()
    again.apply(held.snapshot())
    found = {each for event in held.snapshot() for each in event.block_hashes}
    assert found == expected
    assert len(held) == len(again) == len(expected)


def test_runs_are_told_whole_with_the_block_before_them() -> None:
    held = HeldBlocks()
    held.apply([BlocksStored((1, 2, 3)), BlocksStored((9,)), BlocksStored((4, 5), 3), BlocksEvicted((2,))])
    assert list(held.snapshot()) == [
        BlocksStored((1,)),
        BlocksStored((3,), 2),
        BlocksStored((9,)),
        BlocksStored((4, 5), 3),
    ]


def test_beyond_the_limit_the_oldest_prefixes_are_told() -> None:
    held = HeldBlocks(max_hashes=3)
    held.apply([BlocksStored((1, 2)), BlocksStored((7, 8))])
    assert list(held.snapshot()) == [BlocksStored((1, 2)), BlocksStored((7,))]
