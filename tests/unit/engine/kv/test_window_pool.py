"""Window blocks: who has one, when it is let go, and which prefixes can be used then."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.prefix import PrefixHasher
from engine.kv import Division, KvCache
from engine.kv.block_pool import BlockTable

SIZE = 4


def hasher_of(tokens: list[int]) -> PrefixHasher:
    hasher = PrefixHasher(model="m", adapter="", salt=b"", block_size=SIZE)
    hasher.extend(tokens, len(tokens))
    return hasher


def computed(cache: KvCache, tokens: list[int], chunk: int = 8) -> BlockTable:
    """A sequence whose tokens were computed in chunks, and which holds its window now."""
    table, hasher = BlockTable(), hasher_of(tokens)
    cache.adopt(table, cache.find_prefix(hasher, len(tokens)))
    done = len(table) * SIZE
    while done < len(tokens):
        end = min(done + chunk, len(tokens))
        cache.prepare_write(table, done, end)
        cache.prepare_windows(table, end)
        cache.register(table, hasher, end)
        cache.give_up(table, end)
        done = end
    return table


def found(cache: KvCache, tokens: list[int]) -> int:
    return cache.find_prefix(hasher_of(tokens), len(tokens)).num_blocks


def cache_of(num_window_blocks: int, *, window: int = 8, num_blocks: int = 64) -> KvCache:
    return KvCache(num_blocks=num_blocks, block_size=SIZE, window=window, num_window_blocks=num_window_blocks)


def test_a_long_prompt_holds_its_window_and_all_of_its_blocks() -> None:
    cache = cache_of(8)
    table = computed(cache, list(range(120)))
    assert len(table.held) == 30
    # The window, one block of slack, and one of which a part has left the window.
    assert table.num_in_window <= 8 // SIZE + 2
    cache.check_invariants([table])
    cache.free(table)
    assert cache.num_available == 64
    assert cache.num_available_window_blocks == 8


def test_a_plan_hears_of_each_new_window_block_once() -> None:
    cache = cache_of(8)
    table = computed(cache, list(range(10)))
    given, copies = cache.drain_window_blocks()
    assert [block for block, _ in given] == table.block_ids
    assert len({kept for _, kept in given}) == 3
    assert copies == cache.drain_window_blocks()[0] == ()


def test_a_prefix_needs_what_its_next_position_sees() -> None:
    cache, tokens = cache_of(16), list(range(40))
    cache.free(computed(cache, tokens))
    assert found(cache, tokens) == 9
    # Takes all but two: of the first sequence's last blocks, those given up first are gone.
    cache.free(computed(cache, [99] * 3 + list(range(500, 545)), chunk=48))
    left = found(cache, tokens)
    assert left < 9
    table = computed(cache, tokens)
    cache.check_invariants([table])
    cache.free(table)
    # What was computed once more is found in place of what had lost its window block.
    assert found(cache, tokens) == 9


def test_what_lost_its_window_is_of_use_as_far_as_nobody_sees_it() -> None:
    cache, tokens = cache_of(5), list(range(40))
    cache.free(computed(cache, tokens, chunk=4))
    # Five window blocks hold the end of the prompt; its beginning lies behind them.
    assert found(cache, tokens) == 9
    assert found(cache, tokens[:20]) == 0


def test_a_fork_copies_its_window_block_as_well() -> None:
    cache = cache_of(8)
    parent, child = computed(cache, list(range(10))), BlockTable()
    cache.drain_window_blocks()
    cache.share(child, parent, 10)
    assert cache.num_new_window_blocks(child, 9, 10) == 1
    cache.prepare_write(child, 9, 10)
    (given,), (copy,) = cache.drain_window_blocks()
    assert given == (child.block_ids[2], copy[1])
    assert child.in_window[:2] == parent.in_window[:2]
    cache.check_invariants([parent, child])
    cache.free(parent)
    cache.check_invariants([child])


def test_no_more_are_given_than_there_are() -> None:
    cache = cache_of(5)
    table = BlockTable()
    cache.prepare_write(table, 0, 24)
    assert cache.num_new_window_blocks(table, 0, 24) == 6
    with pytest.raises(IndexError, match="no window block"):
        cache.prepare_windows(table, 24)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    window=st.sampled_from((1, 5, 8, 30)),
    num_window_blocks=st.sampled_from((12, 20, 64)),
)
def test_any_order_of_use_keeps_the_books(seed: int, window: int, num_window_blocks: int) -> None:
    rng = random.Random(seed)
    cache = cache_of(num_window_blocks, window=window, num_blocks=40)
    tables: list[BlockTable] = []
    for _ in range(80):
        action = rng.randrange(4)
        room = cache.num_available >= 12 and cache.num_available_window_blocks >= 12
        if action == 0 and room:
            tables.append(computed(cache, [rng.randrange(2)] * rng.randrange(1, 44), rng.randrange(1, 12)))
        elif action == 1 and tables:
            cache.free(tables.pop(rng.randrange(len(tables))))
        elif action == 2 and tables and room:
            parent, child = rng.choice(tables), BlockTable()
            covered = len(parent) * SIZE
            cache.share(child, parent, covered)
            cache.prepare_write(child, covered - 1, covered)
            tables.append(child)
        elif action == 3 and rng.random() < 0.1:
            cache.forget_contents()
        cache.drain_transfers()
        cache.drain_window_blocks()
        cache.check_invariants(tables)
    for table in tables:
        cache.free(table)
    assert cache.num_available == 40
    assert cache.num_available_window_blocks == num_window_blocks


def moving(num_blocks: int, num_window_blocks: int) -> KvCache:
    """A cache in which a window block takes the memory of three blocks, divided so at first."""
    division = Division(
        num_blocks=num_blocks, num_window_blocks=num_window_blocks, block_bytes=1, window_block_bytes=3
    )
    return KvCache(
        num_blocks=num_blocks + 3 * num_window_blocks,
        block_size=SIZE,
        window=8,
        num_window_blocks=num_window_blocks + num_blocks // 3,
        division=division,
    )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30), num_blocks=st.sampled_from((12, 41)), num_windows=st.sampled_from((6, 20))
)
def test_any_order_of_use_keeps_the_books_while_memory_moves(
    seed: int, num_blocks: int, num_windows: int
) -> None:
    rng, cache = random.Random(seed), moving(num_blocks, num_windows)
    tables: list[BlockTable] = []
    for _ in range(80):
        action = rng.randrange(4)
        # Whatever is asked for: what is held stays, and what was found is there.
        wanted = rng.randrange(num_blocks + 3 * num_windows), rng.randrange(num_windows + num_blocks // 3 + 1)
        if cache.make_room(*wanted):
            assert cache.num_available >= wanted[0]
            assert cache.num_available_window_blocks >= wanted[1]
        length = rng.randrange(1, 44)
        if action == 0 and cache.make_room(-(-length // SIZE) + 1, min(-(-length // SIZE) + 1, 6)):
            tables.append(computed(cache, [rng.randrange(2)] * length, rng.randrange(1, 9)))
        elif action == 1 and tables:
            cache.free(tables.pop(rng.randrange(len(tables))))
        elif action == 3 and rng.random() < 0.1:
            cache.forget_contents()
        cache.drain_transfers()
        cache.drain_window_blocks()
        blocks, windows = cache.drain_retired()
        # Pages go of what nobody holds or can find.
        assert cache._windows is not None
        assert not {*blocks} & {
            *cache._pool._cached.values(),
            *(each for table in tables for each in table.held),
        }
        assert not {*windows} & {*cache._windows._window_block_of}
        cache.check_invariants(tables)
    for table in tables:
        cache.free(table)
    assert cache.num_available == cache.num_present
    assert cache.num_available_window_blocks == cache.num_present_window_blocks


def test_memory_goes_where_it_is_lacking() -> None:
    cache = moving(30, 10)
    assert cache.make_room(30, 10)
    assert not cache.make_room(31, 10)
    assert not cache.make_room(31, 11)
    assert (cache.num_present, cache.num_present_window_blocks) == (30, 10)
    # One window block is three blocks.
    assert cache.make_room(31, 9)
    assert (cache.num_available, cache.num_available_window_blocks) == (33, 9)
    blocks, windows = cache.drain_retired()
    assert (blocks, len(windows)) == ((), 1)
    assert cache.make_room(0, 20)
    assert cache.num_available_window_blocks == 20
    assert cache.num_available == 0
    blocks, windows = cache.drain_retired()
    assert (len(blocks), windows) == (33, ())
    assert not cache.make_room(1, 20)
    cache.check_invariants([])


def test_what_sequences_hold_stays() -> None:
    cache = moving(30, 10)
    table = computed(cache, list(range(80)))
    held = table.num_in_window
    assert not cache.make_room(10 + 3 * (10 - held) + 1, 0)
    assert cache.make_room(10 + 3 * (10 - held), 0)
    cache.check_invariants([table])
    cache.free(table)
    assert cache.num_available == 30 + 3 * (10 - held)
    assert found(cache, [*range(80), 99]) == 20


def test_a_prefix_that_is_used_outlives_what_makes_room() -> None:
    cache, tokens = moving(30, 20), list(range(24))
    cache.free(computed(cache, tokens))
    cache.free(computed(cache, list(range(100, 124))))
    prefix = cache.find_prefix(hasher_of(tokens), len(tokens))
    assert prefix.num_blocks == 5
    cache.use(prefix)
    assert cache.make_room(5, 20 + (30 - 5) // 3)
    table = BlockTable()
    cache.adopt(table, cache.find_prefix(hasher_of(tokens), len(tokens)))
    assert len(table) == 5
    cache.check_invariants([table])
