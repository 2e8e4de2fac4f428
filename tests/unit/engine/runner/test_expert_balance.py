"""When the leader has experts change ranks, and that their weights arrive whole: both ranks of a stage in one
process, where a step is a number that is counted up.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.model.expert_places import ExpertExchange, ExpertMove
from engine.model.records import FeedForward, Layer, Linear, SparseFeedForward
from engine.model.spec import ExpertSpec
from engine.runner.ranks import balance
from engine.runner.ranks.balance import BalanceRule, ExpertBalance, KeepWeights
from engine.runner.ranks.placement import exchanges, group_loads, imbalance, longest_first
from kernels.linear.formats import DenseWeight
from kernels.linear.native import NativePacker
from kernels.native.library import NativeLibrary, NativeUnavailableError, load_native
from kernels.ranks.native import Ranks, RanksShape, shared_memory
from kernels.ranks.shares import Degrees

NUM_EXPERTS, NUM_LAYERS, HIDDEN, INNER = 6, 2, 32, 48
RULE = BalanceRule(look_steps=1, least_rows=10, half_life_rows=100)


@st.composite
def placements(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Positions of experts, what they get, and how many groups there are."""
    num_groups, held = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    count = num_groups * held
    positions = draw(st.permutations(range(count)))
    loads = draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
    return np.array(positions), np.array(loads, np.float64), num_groups


@given(placements())
def test_longest_first_fills_groups_and_is_followed(drawn: tuple[np.ndarray, np.ndarray, int]) -> None:
    positions, loads, num_groups = drawn
    size = len(loads) // num_groups
    wanted = longest_first(positions, loads, num_groups, 0.02)
    assert np.bincount(wanted, minlength=num_groups).tolist() == [size] * num_groups
    by_group = np.bincount(wanted, loads, num_groups)
    # Graham's bound; and once more for the last ones, which go to where there is room.
    assert by_group.max() <= 2 * (loads.sum() / num_groups * 1.02 + loads.max())
    for first, second in exchanges(positions, wanted, loads):
        assert positions[first] // size != positions[second] // size
        positions[[first, second]] = positions[[second, first]]
    assert (positions // size == wanted).all()
    assert sorted(positions) == list(range(len(loads)))
    assert group_loads(positions, loads, num_groups) == pytest.approx(by_group)
    # What is so placed stays.
    assert (longest_first(positions, loads, num_groups, 0.02) == wanted).all()


def test_experts_of_no_load_stay_where_they_are() -> None:
    positions, loads = np.arange(16), np.zeros(16)
    loads[:4] = 10, 9, 8, 7
    wanted = longest_first(positions, loads, 2, 0.02)
    assert len(exchanges(positions, wanted, loads)) == 2
    assert imbalance(np.bincount(wanted, loads, 2)) == 1.0


class Stage:
    """Two ranks, and what each has of every expert."""

    def __init__(
        self, library: NativeLibrary, *, odd: Sequence[int] = (), num_layers: int = NUM_LAYERS
    ) -> None:
        """Experts of the numbers `odd` have another form, in the first layer."""
        shape = RanksShape(
            degrees=Degrees(expert=2),
            max_tokens=8,
            max_sequences=2,
            max_columns=2,
            max_rows=2,
            hidden_size=HIDDEN,
            vocab_size=11,
            num_active=1,
            expert_width=HIDDEN,
            num_experts=NUM_EXPERTS,
            sparse_cuts=(0, num_layers),
            piece_bytes=1000,
        )
        memory = shared_memory(shape)
        try:
            self.ranks = [Ranks(library, shape, rank, memory) for rank in range(2)]
        finally:
            os.close(memory)
        random = torch.Generator().manual_seed(0)
        packer = NativePacker(library, num_threads=1)

        def linear(outputs: int, inputs: int, dtype: torch.dtype) -> Linear:
            values = torch.randn(outputs, inputs, generator=random).to(dtype)
            bias = torch.randn(outputs, generator=random)
            return Linear(weight=packer.pack(DenseWeight(values=values), bias))

        self.layers: list[list[SparseFeedForward]] = [[], []]
        for layer in range(num_layers):
            spec = ExpertSpec(
                num_experts=NUM_EXPERTS,
                num_active=1,
                intermediate_size=INNER,
                layers=tuple(range(num_layers)),
            )
            experts = []
            for number in range(NUM_EXPERTS):
                dtype = torch.bfloat16 if number in odd and not layer else torch.float32
                gate_up, down = linear(2 * INNER, HIDDEN, dtype), linear(HIDDEN, INNER, dtype)
                experts.append(FeedForward(gate_up=gate_up, down=down, activation="silu"))
            for rank in self.ranks:
                held = rank.shape.degrees.held_by(rank.rank, NUM_EXPERTS)
                router = linear(NUM_EXPERTS, HIDDEN, torch.float32)
                self.layers[rank.rank].append(
                    SparseFeedForward(spec=spec, router=router, experts=experts[held], activation="silu")
                )
        self.exchanges = [
            ExpertExchange(
                [Layer(attention=None, feed_forward=each, before=(), after=()) for each in own], rank, library
            )
            for own, rank in zip(self.layers, self.ranks, strict=True)
        ]
        self.contents = [
            [self.content(layer, each) for each in range(NUM_EXPERTS)] for layer in range(num_layers)
        ]
        self.told: list[ExpertMove | KeepWeights] = []
        self.is_settled = True
        self.balance = ExpertBalance(
            self.ranks[0], self.exchanges[0], self.told.append, lambda: self.is_settled
        )

    def content(self, layer: int, expert: int) -> bytes:
        """The bytes of an expert, where it is now."""
        position = int(self.layers[0][layer].places.positions[expert])
        rank, place = divmod(position, NUM_EXPERTS // 2)
        places = self.layers[rank][layer].places
        form, found = places.form, b""
        for part, each in enumerate(places.weights.by_part):
            sizes = form.sizes[part] if form is not None else {}
            for name in sorted(sizes):
                found += _memory(getattr(each[place], name), sizes[name])
        return found

    def step(self, *rows: int) -> None:
        """The leader looks, and hands a step over."""
        self.balance.before_step()
        self.hand_over(*rows)

    def hand_over(self, *rows: int) -> None:
        """The other rank does what it was told, and experts get so many rows each."""
        for message in self.told:
            if isinstance(message, ExpertMove):
                self.exchanges[1].take(message)
            else:
                self.ranks[1].settled[1] = 1
        self.told.clear()
        self.ranks[0]._view(0, (1,), np.uint32)[0] += 1
        self.ranks[0].expert_counts[:] += np.array(rows)
        for layer, contents in enumerate(self.contents):
            assert (self.layers[0][layer].places.positions == self.layers[1][layer].places.positions).all()
            for expert, content in enumerate(contents):
                assert self.content(layer, expert) == content


def _memory(address: int, num_bytes: int) -> bytes:
    return ctypes.string_at(address, num_bytes)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[NativeLibrary]:
    monkeypatch.setattr(balance, "RULE", RULE)
    try:
        yield load_native()
    except NativeUnavailableError as reason:
        pytest.skip(f"no native kernels: {reason}")


def test_experts_follow_the_load_as_it_drifts(library: NativeLibrary) -> None:
    stage = Stage(library)
    for rows in ((9, 9, 0, 0, 0, 1), (0, 0, 9, 9, 0, 1), (9, 0, 9, 0, 0, 1)):
        for _ in range(300):
            stage.step(*rows)
        assert stage.balance.spread.imbalance < 1.15
    # Each time the two that are used were on one rank, in two layers.
    assert stage.balance.spread.num_moves >= 8


def test_pieces_wait_for_steps(library: NativeLibrary) -> None:
    stage = Stage(library)
    while not stage.balance._pairs:
        stage.hand_over(9, 9, 0, 0, 0, 0)
        stage.balance.before_step()
    (first,) = stage.told
    # Steps that fail before anybody hears of them take nothing along.
    for _ in range(3):
        stage.balance.before_step()
    assert stage.told == [first]
    stage.hand_over(9, 9, 0, 0, 0, 0)
    for _ in range(100):
        stage.step(9, 9, 0, 0, 0, 0)
    assert stage.balance.spread.num_moves == 2 * NUM_LAYERS


def test_nothing_moves_while_weights_are_written(library: NativeLibrary) -> None:
    stage = Stage(library)
    stage.is_settled = False
    for _ in range(50):
        stage.step(9, 9, 0, 0, 0, 0)
    assert not stage.balance._has_asked
    stage.is_settled = True
    stage.balance.before_step()
    # The other rank is asked to write; until it has, nothing moves either.
    assert [type(each) for each in stage.told] == [KeepWeights]
    stage.told.clear()
    for _ in range(50):
        stage.step(9, 9, 0, 0, 0, 0)
    assert stage.balance.spread.num_moves == 0
    stage.ranks[1].settled[1] = 1
    for _ in range(100):
        stage.step(9, 9, 0, 0, 0, 0)
    assert stage.balance.spread.num_moves == 2 * NUM_LAYERS


def test_experts_of_several_forms_stay(library: NativeLibrary) -> None:
    """Of the first layer on one rank; those of the second layer move."""
    stage = Stage(library, odd=(4,))
    for _ in range(100):
        stage.step(9, 9, 0, 0, 0, 0)
    assert stage.layers[0][0].places.positions.tolist() == list(range(NUM_EXPERTS))
    assert stage.balance.spread.num_moves == 2


def test_what_helps_little_or_not_moves_nothing(library: NativeLibrary) -> None:
    for rows in ((9, 0, 0, 0, 0, 0), (9, 8, 9, 8, 8, 8), (100, 2, 0, 0, 0, 8)):
        stage = Stage(library, num_layers=1)
        for _ in range(50):
            stage.step(*rows)
        assert stage.balance.spread.num_moves == 0
