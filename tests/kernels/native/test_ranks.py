"""What ranks do together, by threads that each have a view of the memory of their own: the reference's bits,
whoever is there first.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.adapters.rows import BLOCK_ROWS, NO_ADAPTER, AdapterRows
from kernels.experts.native import ExpertsApart, WeightsByPlace, sparse_ops
from kernels.native.library import NativeLibrary, Op, Program, StepStruct
from kernels.ranks.native import FORWARD, LOGITS, Ranks, RanksShape, shared_memory
from kernels.ranks.reference import micro_batch, side_by_side, summed
from kernels.ranks.shares import MOST_RANKS, Degrees, share_of
from kernels.recurrent.rows import StateRows
from tests.kernels.native.test_experts import HIDDEN, Layer
from tests.kernels.routings import ROUTINGS

LIMIT_S = 60.0


def shape_of(num_ranks: int, *, width: int = 33, vocab_size: int = 101) -> RanksShape:
    return RanksShape(
        degrees=Degrees(tensor=num_ranks),
        max_tokens=70,
        max_sequences=5,
        max_columns=7,
        max_rows=9,
        hidden_size=width,
        vocab_size=vocab_size,
    )


def views(library: NativeLibrary, shape: RanksShape) -> list[Ranks]:
    memory = shared_memory(shape)
    try:
        return [Ranks(library, shape, rank, memory) for rank in range(shape.num_ranks)]
    finally:
        os.close(memory)


def together(ranks: list[Ranks], compute: Callable[[Ranks], None]) -> None:
    """Has each rank compute in a thread of its own."""
    threads = [threading.Thread(target=compute, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def run(library: NativeLibrary, ranks: Ranks, ops: list[Op]) -> None:
    """A pool for each rank, whose threads are not the others'."""
    Program(library, ops).run(library.pool(1 + ranks.rank))


@pytest.fixture(params=[2, 3, 4])
def num_ranks(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.mark.parametrize("num_tokens", [1, 63, 70])
@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_are_in_the_order_of_ranks(
    native: NativeLibrary, num_ranks: int, num_tokens: int, accumulate: bool
) -> None:
    shape = shape_of(num_ranks)
    random = np.random.default_rng(num_tokens)
    num_sums = 6
    parts = random.standard_normal((num_sums, num_ranks, num_tokens, shape.hidden_size), np.float32)
    parts *= 10.0 ** random.integers(-4, 5, parts.shape)
    before = random.standard_normal((num_tokens, shape.hidden_size), np.float32)
    ranks = views(native, shape)
    found: dict[int, list[NDArray[np.float32]]] = {}

    def compute(rank: Ranks) -> None:
        step = StepStruct(num_tokens=num_tokens)
        found[rank.rank] = []
        for turn in range(num_sums):
            rank.part(turn)[:num_tokens] = parts[turn, rank.rank]
            # One row more, which nobody writes to.
            out = np.full((num_tokens + 1, shape.hidden_size), np.nan, np.float32)
            if accumulate:
                out[:num_tokens] = before
            run(native, rank, [rank.sum_op(ctypes.addressof(step), turn, out, accumulate=accumulate)])
            found[rank.rank].append(out)

    together(ranks, compute)
    for turn in range(num_sums):
        expected = summed(list(parts[turn]), before if accumulate else None)
        for rank in ranks:
            assert (found[rank.rank][turn][:num_tokens] == expected).all()
            assert np.isnan(found[rank.rank][turn][num_tokens]).all()


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("expert", [2, 4])
def test_experts_of_several_ranks_are_added_as_by_one(
    native: NativeLibrary, expert: int, moves: bool
) -> None:
    """Each rank computes what its experts give; sums have the bits of one that has them all, also where
    experts change ranks from turn to turn. One rank counts their rows.
    """
    torch.manual_seed(expert)
    routing = ROUTINGS["softmax"]
    whole = Layer(native, routing)
    num_tokens, num_turns = 37, 3
    x = [torch.randn(num_tokens, HIDDEN) for _ in range(num_turns)]
    expected = [whole(each) for each in x]
    ranks = views(
        native,
        replace(
            shape_of(expert, width=HIDDEN),
            degrees=Degrees(expert=expert),
            num_active=routing.num_active,
            expert_width=HIDDEN,
        ),
    )
    found: dict[int, list[Tensor]] = {}
    counts = np.zeros(routing.num_experts, np.int64)

    def compute(rank: Ranks) -> None:
        held = rank.shape.degrees.held_by(rank.rank, routing.num_experts)
        own = replace(whole.layer, gate_up=whole.layer.gate_up[held], down=whole.layer.down[held])
        placed = WeightsByPlace(own.gate_up, own.down)
        positions = np.arange(routing.num_experts)
        step = StepStruct(num_tokens=num_tokens)
        buffers = whole.new_buffers(70)
        found[rank.rank] = []
        for turn, rows in enumerate(x):
            parts = rank.parts_of_experts(turn)
            address = ctypes.addressof(step)
            if moves:
                positions[:] = np.random.default_rng(turn).permutation(routing.num_experts)
            for number, position in enumerate(positions.tolist()):
                if held.start <= position < held.stop:
                    placed.by_part[0][position - held.start] = whole.layer.gate_up[number][0].struct
                    placed.by_part[1][position - held.start] = whole.layer.down[number].struct
            apart = ExpertsApart(
                first=held.start,
                rows=parts[0],
                parts=parts,
                meet=rank.meet_op(address),
                positions=positions,
                counts=counts if rank.leads else None,
                placed=placed,
            )
            out = torch.full((num_tokens, HIDDEN), float("nan"))
            count = address + StepStruct.num_tokens.offset
            ops = sparse_ops(native, own, buffers, count, rows, out, accumulate=False, apart=apart)
            run(native, rank, ops)
            found[rank.rank].append(out)

    together(ranks, compute)
    for outs in found.values():
        for out, wanted in zip(outs, expected, strict=True):
            assert torch.equal(out, wanted)
    chosen = torch.cat([whole.chosen(each)[0] for each in x])
    assert counts.tolist() == torch.bincount(chosen.flatten(), minlength=routing.num_experts).tolist()


def test_sums_of_some_ranks_are_of_another_width(native: NativeLibrary) -> None:
    """Each two of four, between sums of all of full rows."""
    shape, num_tokens = shape_of(4), 37
    random = np.random.default_rng(0)
    narrow = random.standard_normal((4, num_tokens, 1), np.float32)
    wide = random.standard_normal((4, num_tokens, shape.hidden_size), np.float32)
    found: dict[int, list[NDArray[np.float32]]] = {}

    def compute(rank: Ranks) -> None:
        address = ctypes.addressof(step := StepStruct(num_tokens=num_tokens))
        found[rank.rank] = []
        for turn, (parts, among) in enumerate(((wide, 0), (narrow, 2), (wide, 0))):
            width = parts.shape[2]
            rank.part(turn, width)[:num_tokens] = parts[rank.rank]
            out = np.full((num_tokens, width), np.nan, np.float32)
            run(native, rank, [rank.sum_op(address, turn, out, accumulate=False, among=among)])
            found[rank.rank].append(out)
        assert step.num_tokens == num_tokens

    together(views(native, shape), compute)
    for rank, (first, own, last) in found.items():
        assert (first == summed(list(wide))).all()
        assert (own == summed(list(narrow[rank // 2 * 2 :][:2]))).all()
        assert (last == first).all()


@pytest.mark.parametrize("num_rows", [1, 9])
def test_logits_lie_side_by_side(native: NativeLibrary, num_ranks: int, num_rows: int) -> None:
    shape = shape_of(num_ranks)
    random = np.random.default_rng(num_rows)
    parts = [
        random.standard_normal((num_rows, columns.stop - columns.start), np.float32)
        for columns in map(shape.columns, range(num_ranks))
    ]
    ranks = views(native, shape)
    out = np.full((shape.max_rows, shape.vocab_size), np.nan, np.float32)
    wanted = np.zeros(num_rows, np.int64)

    def compute(rank: Ranks) -> None:
        step = StepStruct(num_logit_rows=num_rows, logit_rows=wanted.ctypes.data)
        whole = out if rank.leads else None
        ops = [rank.logits_op(ctypes.addressof(step), whole)]
        if rank.leads:
            ops = [rank.step_op(step, LOGITS), *ops]
        else:
            assert rank.wait(LIMIT_S)
        rank.logits(whole)[:num_rows] = parts[rank.rank]
        run(native, rank, ops)

    together(ranks, compute)
    assert (out[:num_rows] == side_by_side(parts)).all()
    assert np.isnan(out[num_rows:]).all()


def test_python_and_the_library_know_the_same_number_of_ranks() -> None:
    assert f"kMostRanks = {MOST_RANKS};" in Path("kernels/ranks/ranks.h").read_text(encoding="utf-8")


def test_a_step_arrives_as_it_was_handed_over(native: NativeLibrary) -> None:
    leader, follower = views(native, shape_of(2))
    random = np.random.default_rng(0)
    rows = np.array([4, 0, 2], np.int64)
    step, head = StepStruct(), StepStruct(num_logit_rows=rows.size, logit_rows=rows.ctypes.data)
    forward, logits = leader.step_op(step, FORWARD), leader.step_op(head, LOGITS)
    assert not follower.wait(0.001)
    for tokens, sequences, columns in ((70, 5, 7), (1, 1, 1), (8, 2, 3)):
        sizes = (tokens, tokens, tokens, sequences + 1, sequences, sequences, sequences * columns)
        arrays = [random.integers(0, 1 << 40, size) for size in sizes]
        by_sequence = ("query_starts", "context_lens", "recent_rows")
        names = ("token_ids", "positions", "slots", *by_sequence, "block_tables")
        for name, array in zip(names, arrays, strict=True):
            setattr(step, name, array.ctypes.data)
        step.num_tokens, step.num_sequences, step.max_blocks = tokens, sequences, columns
        adapted = AdapterRows.of(random.integers(-1, 3, tokens) if tokens > 1 else np.array([NO_ADAPTER]))
        step.num_adapter_blocks = 0 if adapted is None else len(adapted.blocks)
        if adapted is not None:
            step.adapter_rows, step.adapter_blocks = (
                each.ctypes.data for each in (adapted.rows, adapted.blocks)
            )
        leader.num_messages += 1
        run(native, leader, [forward])
        assert follower.wait(LIMIT_S)
        assert follower.kind == FORWARD
        assert follower.num_messages_before == leader.num_messages[0]
        for ours, theirs in zip(follower.arrays(), arrays, strict=True):
            assert (ours.ravel() == theirs).all()
        arrived = follower.adapter_rows()
        assert (arrived is None) == (adapted is None)
        if arrived is not None and adapted is not None:
            assert (arrived.rows == adapted.rows).all()
            assert (arrived.blocks == adapted.blocks).all()
        # Until a rank is through with a step nothing of that is written to.
        leading = threading.Thread(target=run, args=(native, leader, [logits]), daemon=True)
        leading.start()
        assert not follower.wait(0.001)
        run(native, follower, [follower.done_op()])
        leading.join(LIMIT_S)
        assert follower.wait(LIMIT_S)
        assert follower.kind == LOGITS
        assert (follower.rows() == rows).all()
        run(native, follower, [follower.logits_op(ctypes.addressof(head), None)])
    assert not follower.wait(0.001)


def states_of(lengths: tuple[int, ...], random: np.random.Generator) -> StateRows:
    """Slots of so many rows, each of which leaves snapshots after some of its tokens."""
    ends = [np.sort(random.choice(length, random.integers(length + 1), replace=False)) for length in lengths]
    begins = np.cumsum([0, *lengths])
    rows = np.concatenate([begin + each for begin, each in zip(begins, ends, strict=False)]).astype(np.int64)
    return StateRows(
        slots=random.permutation(100)[: len(lengths)].astype(np.int64),
        snapshot_starts=np.cumsum([0, *map(len, ends)]),
        snapshot_rows=rows,
        snapshot_slots=random.permutation(1000)[: rows.size].astype(np.int64),
    )


def point_to_states(step: ctypes.Structure, states: StateRows) -> None:
    step.state_slots, step.snapshot_starts = states.slots.ctypes.data, states.snapshot_starts.ctypes.data
    step.snapshot_rows, step.snapshot_slots = (
        each.ctypes.data for each in (states.snapshot_rows, states.snapshot_slots)
    )


def test_states_arrive_as_they_were_handed_over(native: NativeLibrary) -> None:
    leader, follower = views(native, shape_of(2))
    random, step = np.random.default_rng(0), StepStruct()
    forward = leader.step_op(step, FORWARD)
    for lengths in ((70,), (1, 5, 40), (1, 1, 1, 1, 1)):
        numbers = np.zeros(3 * sum(lengths), np.int64)
        starts = np.cumsum([0, *lengths])
        step.num_tokens, step.num_sequences, step.max_blocks = sum(lengths), len(lengths), 1
        step.token_ids = step.positions = step.slots = step.block_tables = numbers.ctypes.data
        step.query_starts = step.context_lens = starts.ctypes.data
        for states in (states_of(lengths, random), None):
            step.state_slots = None
            if states is not None:
                leader.check_states(states)
                point_to_states(step, states)
            run(native, leader, [forward])
            assert follower.wait(LIMIT_S)
            arrived = follower.states()
            assert (arrived is None) == (states is None)
            if states is not None:
                for name, ours in vars(states).items():
                    assert (getattr(arrived, name) == ours).all()
            run(native, follower, [follower.done_op()])
    most = replace(states_of((1,), random), snapshot_rows=np.zeros(141, np.int64))
    with pytest.raises(ValueError, match="141 snapshots of states, but ranks have room for 140"):
        leader.check_states(most)


@pytest.mark.parametrize("lengths", [(70,), (1, 5, 40, 3), (30, 34, 1, 1, 1), (1, 1, 1)])
@pytest.mark.parametrize("count", [2, 3])
def test_micro_batches_are_runs_of_rows(native: NativeLibrary, lengths: tuple[int, ...], count: int) -> None:
    leader, *_ = views(native, shape_of(2))
    starts = np.cumsum([0, *lengths])
    slots = np.random.default_rng(count).integers(-1, 4, int(starts[-1]))
    adapted = AdapterRows.of(slots)
    assert adapted is not None
    contexts = np.array(lengths) + np.arange(len(lengths)) * 7
    rows, tables = np.arange(3 * starts[-1]).reshape(3, -1), np.arange(len(lengths) * 4).reshape(-1, 4)
    step = StepStruct(
        num_tokens=int(starts[-1]),
        num_sequences=len(lengths),
        max_blocks=4,
        token_ids=rows[0].ctypes.data,
        positions=rows[1].ctypes.data,
        slots=rows[2].ctypes.data,
        query_starts=starts.ctypes.data,
        context_lens=contexts.ctypes.data,
        block_tables=tables.ctypes.data,
        num_adapter_blocks=len(adapted.blocks),
        adapter_rows=adapted.rows.ctypes.data,
        adapter_blocks=adapted.blocks.ctypes.data,
    )
    states = states_of(lengths, np.random.default_rng(count))
    point_to_states(step, states)
    left: list[tuple[int, int]] = []

    def numbers(address: int, size: int) -> list[int]:
        return list((ctypes.c_int64 * size).from_address(address))

    for index in range(count):
        own = StepStruct()
        op = leader.micro_batch_op(ctypes.addressof(step), own, index, count)
        run(native, leader, [op])
        expected = micro_batch(starts, contexts, index, count)
        size, sequences = expected.query_starts[-1], len(expected.context_lens)
        assert (own.num_tokens, own.num_sequences, own.max_blocks) == (size, sequences, 4)
        for ours, whole in zip((own.token_ids, own.positions, own.slots), rows, strict=True):
            assert numbers(ours, size) == list(whole[expected.begin : expected.begin + size])
        assert numbers(own.query_starts, sequences + 1) == expected.query_starts
        assert numbers(own.context_lens, sequences) == expected.context_lens
        assert numbers(own.block_tables, 4) == list(tables[expected.first_sequence])
        first = expected.first_sequence
        assert numbers(own.state_slots, sequences) == list(states.slots[first : first + sequences])
        begins = numbers(own.snapshot_starts, sequences + 1)
        for sequence, (begin, end) in enumerate(itertools.pairwise(begins)):
            for each in range(begin, end):
                row, slot = (numbers(at + 8 * each, 1)[0] for at in (own.snapshot_rows, own.snapshot_slots))
                assert own.num_tokens > row >= numbers(own.query_starts, sequence + 1)[sequence]
                left.append((expected.begin + row, slot))
        found = np.full(size, NO_ADAPTER)
        for block in range(own.num_adapter_blocks):
            first, num_rows, slot = numbers(own.adapter_blocks + 24 * block, 3)
            assert 1 <= num_rows <= BLOCK_ROWS
            for row in numbers(own.adapter_rows + 8 * first, num_rows):
                assert found[row] == NO_ADAPTER, "each row is in one block"
                found[row] = slot
        assert (found == slots[expected.begin : expected.begin + size]).all()
    assert left == list(zip(states.snapshot_rows, states.snapshot_slots, strict=True))


@pytest.mark.parametrize("count", [1, 3])
def test_stages_compute_one_behind_the_other(native: NativeLibrary, count: int) -> None:
    """Three stages of two ranks, which meet so many times more in each than in the one before. The first one
    has sent all but its last micro-batch when it waits until the last stage has got the first: so all compute
    at a time.
    """
    shape, num_tokens = replace(shape_of(2), degrees=Degrees(tensor=2, pipeline=3)), 67
    given = np.random.default_rng(0).standard_normal((num_tokens, shape.hidden_size), np.float32)
    zeros = [np.zeros(size, np.int64) for size in (num_tokens,) * 3 + (2, 1)]
    arrays = dict(
        zip(("token_ids", "positions", "slots", "query_starts", "context_lens"), zeros, strict=True)
    )
    ranks, arrived = views(native, shape), threading.Event()
    hidden: dict[int, NDArray[np.float32]] = {}

    def compute(rank: Ranks) -> None:
        step = StepStruct(num_tokens=num_tokens, num_sequences=1)
        for name, array in arrays.items():
            setattr(step, name, array.ctypes.data)
        address = ctypes.addressof(step)
        for forward in range(2):
            if rank.leads:
                run(native, rank, [rank.step_op(step, FORWARD)])
            else:
                assert rank.wait(LIMIT_S)
            for index in range(count):
                own = share_of(num_tokens, index, count)
                rows = np.full((own.stop - own.start, shape.hidden_size), np.nan, np.float32)
                if rank.stage:
                    run(native, rank, [rank.receive_op(address, rank.stage - 1, rows, index, count)])
                else:
                    rows[:] = given[own] + forward
                if rank.stage == 2 and not index:
                    arrived.set()
                if not rank.stage and index == count - 1 and count > 1:
                    assert arrived.wait(LIMIT_S)
                run(native, rank, [rank.meet_op(address)] * (1 + rank.stage))
                rows += 1
                if rank.sends:
                    run(native, rank, [rank.send_op(address, rows, index, count)])
            if rank.leads:
                run(native, rank, [rank.receive_op(address, 2, None, count - 1, count)])
                hidden[forward] = rank.hidden(2)[:num_tokens].copy()
            else:
                run(native, rank, [rank.done_op()])

    together(ranks, compute)
    for forward in range(2):
        assert (hidden[forward] == given + forward + 1 + 1 + 1).all()


@pytest.mark.parametrize("size", [(71, 5, 7), (70, 6, 7), (70, 5, 8)])
def test_a_step_without_room_is_refused(native: NativeLibrary, size: tuple[int, int, int]) -> None:
    leader, _ = views(native, shape_of(2))
    leader.check(70, 5, 7)
    with pytest.raises(ValueError, match="ranks have room for 70, 5 and 7"):
        leader.check(*size)


def test_who_waits_for_a_step_looks_around_when_woken(native: NativeLibrary) -> None:
    leader, follower = views(native, shape_of(2))
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(follower.wait(100 * LIMIT_S)), daemon=True)
    waiting.start()
    end_s = time.monotonic() + LIMIT_S
    while waiting.is_alive() and time.monotonic() < end_s:
        leader.wake()
        waiting.join(0.01)
    assert found == [False]


def test_who_waits_goes_on_when_all_is_over(native: NativeLibrary) -> None:
    """The second rank never comes."""
    leader, absent = views(native, shape_of(2))
    out = np.zeros((1, 33), np.float32)

    def compute(rank: Ranks) -> None:
        step = StepStruct(num_tokens=1)
        run(native, rank, [rank.sum_op(ctypes.addressof(step), 0, out, accumulate=False)])

    def end(rank: Ranks) -> None:
        rank.end()

    waiting = threading.Thread(target=compute, args=(leader,), daemon=True)
    waiting.start()
    assert not leader.is_over
    together([absent], end)
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()
    assert leader.is_over
    assert not absent.wait(0.001)
