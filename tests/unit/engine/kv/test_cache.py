"""The books of the KV cache, alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.prefix import PrefixHasher, event_hash
from engine.kv import KvCache
from engine.kv.block_pool import BlockTable
from engine.types import BlocksEvicted, BlocksStored

SIZE = 4


def hasher(*, model: str = "m", adapter: str = "", salt: bytes = b"") -> PrefixHasher:
    return PrefixHasher(model=model, adapter=adapter, salt=salt, block_size=SIZE)


def hashes(tokens: list[int], **key: object) -> list[bytes]:
    chain = hasher(**key)  # type: ignore[arg-type]
    chain.extend(tokens, len(tokens))
    return chain.hashes


def stored(cache: KvCache, tokens: list[int], **key: object) -> BlockTable:
    """A sequence that was computed and registered, still holding its blocks."""
    chain, table = hasher(**key), BlockTable()  # type: ignore[arg-type]
    chain.extend(tokens, len(tokens))
    cache.adopt(table, cache.find_prefix(chain, len(tokens)))
    cache.prepare_write(table, len(table) * SIZE, len(tokens))
    cache.register(table, chain, len(tokens))
    return table


def found(cache: KvCache, tokens: list[int], **key: object) -> int:
    chain = hasher(**key)  # type: ignore[arg-type]
    chain.extend(tokens, len(tokens))
    return cache.find_prefix(chain, len(tokens)).num_blocks


def test_a_hash_depends_on_everything_before_it_and_on_whose_it_is() -> None:
    tokens = list(range(12))
    base = hashes(tokens)
    assert hashes([9, *tokens[1:]])[2] != base[2]
    assert hashes(tokens[:8]) == base[:2]
    for key in ({"model": "n"}, {"adapter": "a"}, {"salt": b"s"}):
        assert not set(hashes(tokens, **key)) & set(base)
    # Lengths are part of the root, so that no two keys run into each other.
    assert hashes(tokens, model="ma", adapter="b") != hashes(tokens, model="m", adapter="ab")


def test_a_hit_never_covers_the_whole_prompt() -> None:
    cache = KvCache(num_blocks=16, block_size=SIZE)
    cache.free(stored(cache, list(range(8))))
    assert found(cache, list(range(8))) == 1
    assert found(cache, list(range(9))) == 2
    assert found(cache, list(range(9)), salt=b"other") == 0


def test_only_unreferenced_blocks_are_evicted_least_recently_used_first() -> None:
    cache = KvCache(num_blocks=6, block_size=SIZE)
    kept = stored(cache, [1] * 8)
    old = stored(cache, [2] * 8)
    cache.free(old)
    young = stored(cache, [3] * 8)
    cache.free(young)
    taken = stored(cache, [4] * 4)
    cache.check_invariants([kept, taken])
    # The tail of the oldest chain went first.
    assert found(cache, [2] * 9) == 1
    assert found(cache, [1] * 9) == found(cache, [3] * 9) == 2
    with pytest.raises(IndexError):
        stored(cache, [5] * 20)


def test_sharing_copies_only_the_block_that_is_written() -> None:
    cache = KvCache(num_blocks=16, block_size=SIZE)
    parent, child = BlockTable(), BlockTable()
    cache.prepare_write(parent, 0, 10)
    cache.share(child, parent, 10)
    assert cache.num_new_blocks(child, 9, 10) == 1
    cache.prepare_write(child, 9, 10)
    copies, _, _ = cache.drain_transfers()
    assert copies == ((parent.block_ids[2], child.block_ids[2]),)
    assert child.block_ids[:2] == parent.block_ids[:2]
    cache.check_invariants([parent, child])
    cache.free(parent)
    cache.check_invariants([child])
    # The last holder writes in place.
    assert cache.num_new_blocks(child, 0, 10) == 0
    cache.free(child)
    assert cache.num_available == 16


def test_events_name_chains_and_evictions() -> None:
    cache = KvCache(num_blocks=4, block_size=SIZE)
    tokens = list(range(12))
    cache.free(stored(cache, tokens))
    chain = [event_hash(each) for each in hashes(tokens)]
    assert cache.drain_events() == (BlocksStored(tuple(chain), 0),)
    stored(cache, [7] * 16)
    events = cache.drain_events()
    evicted = [each for event in events if isinstance(event, BlocksEvicted) for each in event.block_hashes]
    assert sorted(evicted) == sorted(chain)


def test_evicted_content_comes_back_from_the_host() -> None:
    cache = KvCache(num_blocks=4, block_size=SIZE, num_host_blocks=4)
    cache.free(stored(cache, [1] * 12))
    other = stored(cache, [2] * 16)
    _, offloads, _ = cache.drain_transfers()
    assert len(offloads) == 3
    cache.free(other)
    cache.begin_step()
    table = stored(cache, [1] * 13)
    _, _, restores = cache.drain_transfers()
    assert {host for host, _ in restores} == {host for _, host in offloads}
    assert [device for _, device in restores] == table.block_ids[:3]
    cache.check_invariants([table])


def test_restoring_is_left_when_computing_is_cheaper() -> None:
    cache = KvCache(num_blocks=4, block_size=SIZE, num_host_blocks=4)
    cache.free(stored(cache, [1] * 12))
    cache.free(stored(cache, [2] * 16))
    chain = hasher()
    chain.extend([1] * 13, 13)
    assert cache.find_prefix(chain, 13, restore_worth_it=False).num_blocks == 0
    assert cache.find_prefix(chain, 13).num_blocks == 3


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1 << 30), num_host_blocks=st.sampled_from((0, 5)))
def test_any_order_of_use_keeps_the_books(seed: int, num_host_blocks: int) -> None:
    rng = random.Random(seed)
    cache = KvCache(num_blocks=24, block_size=SIZE, num_host_blocks=num_host_blocks)
    tables: list[BlockTable] = []
    for _ in range(80):
        cache.begin_step()
        action = rng.randrange(4)
        if action == 0 and cache.num_available >= 6:
            tables.append(stored(cache, [rng.randrange(2)] * rng.randrange(1, 24)))
        elif action == 1 and tables:
            cache.free(tables.pop(rng.randrange(len(tables))))
        elif action == 2 and tables and cache.num_available >= 2:
            parent, child = rng.choice(tables), BlockTable()
            covered = len(parent) * SIZE
            cache.share(child, parent, covered)
            cache.prepare_write(child, covered - 1, covered)
            tables.append(child)
        elif action == 3 and rng.random() < 0.1:
            cache.forget_contents()
        cache.drain_transfers()
        cache.check_invariants(tables)
    for table in tables:
        cache.free(table)
    assert cache.num_available == 24
