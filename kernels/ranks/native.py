"""The memory that ranks share, and the native ops over it (ranks.h). No torch.

The memory is a file without a name (memfd_create): whoever starts the ranks makes it and hands it on by its
descriptor. It is gone with the last process that has it, however that ends.

In it lie words on cache lines of their own; the step that the first rank handed over; parts of sums, and
what experts gave, in two rooms each that take turns, so that a rank may write its next part while others
still read the last one, and none needs to wait a second time; hidden states, in a room for each stage of a
pipeline; the other ranks' logits; and of experts that change ranks what decides it, and weights in pieces.

Shape letters: N ranks, T tokens, S sequences, C block columns, R rows whose logits are wanted, A rows with an
adapter, B blocks of these, E hidden size, V vocabulary, P places of experts (choices of all tokens), W
elements that an expert gives, X experts of a layer, L layers of all stages that have some.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.adapters.rows import AdapterRows
from kernels.host import address_of
from kernels.native.library import NativeLibrary, Op
from kernels.native.mirror import structure
from kernels.ranks.shares import Degrees, share_of
from kernels.recurrent.rows import StateRows

RankStepArgs = structure("RankStepArgs")
RankDoneArgs = structure("RankDoneArgs")
RankMicroBatchArgs = structure("RankMicroBatchArgs")
RankRowsArgs = structure("RankRowsArgs")
RankSumArgs = structure("RankSumArgs")
RankLogitsArgs = structure("RankLogitsArgs")
# Kinds of a step in ranks.h.
FORWARD, LOGITS = 0, 1
# Rows of a micro-batch, at least: each reads all weights of a stage, which products of fewer rows wait for.
# And of one where there are more micro-batches than stages: reading is little beside such products.
LEAST_ROWS, MORE_ROWS = 32, 128
# Of an expert that changes ranks this much goes over before a step, for which who streams waits that longer.
PIECE_BYTES = 1 << 20
# All words lie on the first page.
_WORDS_BYTES = 4096
_NUM_NUMBERS = 8
# Of each token that a step computes at most: at the end of a block, and before a draft.
_MOST_SNAPSHOTS = 2
_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class RanksShape:
    """How many ranks there are, and the most that a step has."""

    degrees: Degrees
    max_tokens: int
    max_sequences: int
    # Block columns of a sequence.
    max_columns: int
    max_rows: int
    hidden_size: int
    vocab_size: int
    # Experts that a token passes in a layer, and W; zeros where there are none.
    num_active: int = 0
    expert_width: int = 0
    # X, and by stage the first of the L layers, and L; nothing where experts stay where they are.
    num_experts: int = 0
    sparse_cuts: tuple[int, ...] = (0,)
    # Of an expert's weights, that go from rank to rank between two steps.
    piece_bytes: int = PIECE_BYTES
    # Micro-batches for each stage of a pipeline, at most.
    most_by_stage: int = 4

    @property
    def num_ranks(self) -> int:
        """Ranks that share the model."""
        return self.degrees.size

    def num_micro_batches(self, num_tokens: int) -> int:
        """How many parts a step of so many rows is cut into: as many as there are stages, so that all compute
        at a time; some times as many of a long step, since all but one wait for the first part, and again for
        the last; or one, where these would be small.
        """
        stages = self.degrees.pipeline
        if stages == 1 or num_tokens < stages * LEAST_ROWS:
            return 1
        count = stages
        while count < self.most_by_stage * stages and num_tokens >= 2 * count * MORE_ROWS:
            count *= 2
        return count

    @property
    def micro_batch_counts(self) -> list[int]:
        """Those of all steps that there may be, ascending; the first is 1."""
        return sorted(set(map(self.num_micro_batches, range(1, self.max_tokens + 1))))

    @property
    def num_sparse_layers(self) -> int:
        """L; 0 where experts stay where they are."""
        return self.sparse_cuts[-1]

    @property
    def num_places(self) -> int:
        """Choices of experts that the tokens of a step make."""
        return self.max_tokens * self.num_active

    def columns(self, rank: int) -> slice:
        """The part of the vocabulary whose logits a rank computes."""
        return share_of(self.vocab_size, rank, self.num_ranks)

    @property
    def most_columns(self) -> int:
        """Of the vocabulary, that a rank has."""
        return -(-self.vocab_size // self.num_ranks)

    @property
    def num_array_elements(self) -> int:
        """Of the step's arrays, all of them int64, but for the rows of logits."""
        return 3 * self.max_tokens + 3 * self.max_sequences + 1 + self.max_sequences * self.max_columns

    @property
    def state_rooms(self) -> tuple[int, ...]:
        """Elements of the arrays that say where states lie: int64, as those of StateRows."""
        snapshots = _MOST_SNAPSHOTS * self.max_tokens
        return self.max_sequences, self.max_sequences + 1, snapshots, snapshots

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory; what is not written takes none."""
        return _Places(self).end


class _Places:
    """Where the parts of the memory begin, in bytes."""

    def __init__(self, shape: RanksShape) -> None:
        self.numbers = _WORDS_BYTES
        self.arrays = _aligned(self.numbers + 8 * _NUM_NUMBERS)
        self.rows = _aligned(self.arrays + 8 * shape.num_array_elements)
        # Rows with adapters, and their blocks: each row may be one of its own.
        self.adapter_rows = _aligned(self.rows + 8 * shape.max_rows)
        self.adapter_blocks = _aligned(self.adapter_rows + 8 * shape.max_tokens)
        self.states = _aligned(self.adapter_blocks + 3 * 8 * shape.max_tokens)
        self.parts = _aligned(self.states + 8 * sum(shape.state_rooms))
        # Bytes of one rank's part of a sum, and of its logits.
        self.part_bytes = _aligned(4 * shape.max_tokens * shape.hidden_size)
        # What experts gave, in one room.
        self.expert_rows = self.parts + 2 * shape.num_ranks * self.part_bytes
        self.expert_bytes = _aligned(4 * shape.degrees.expert_parts * shape.num_places * shape.expert_width)
        # Hidden states that a stage sends.
        self.hidden = self.expert_rows + 2 * shape.degrees.pipeline * self.expert_bytes
        self.logits = self.hidden + shape.degrees.pipeline * self.part_bytes
        self.logit_bytes = _aligned(4 * shape.max_rows * shape.most_columns)
        # Of experts that change ranks.
        ranks, layers = shape.num_ranks, shape.num_sparse_layers
        self.expert_counts = self.logits + (ranks - 1) * self.logit_bytes
        self.expert_forms = _aligned(self.expert_counts + 8 * layers * shape.num_experts)
        self.settled = _aligned(self.expert_forms + 2 * 8 * ranks * layers)
        self.pieces = _aligned(self.settled + 8 * ranks)
        self.piece_bytes = _aligned(shape.piece_bytes) if layers else 0
        self.end = self.pieces + 2 * ranks * self.piece_bytes


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class Ranks:
    """One rank's view of the shared memory, and of what it does with the others. The first one, 0, leads: it
    says what is computed.
    """

    def __init__(self, library: NativeLibrary, shape: RanksShape, rank: int, fd: int) -> None:
        """`fd` is the memory's descriptor, of which a copy is kept while this lives."""
        self.library, self.shape, self.rank = library, shape, rank
        self.stage = shape.degrees.stage_of(rank)
        self._map = mmap.mmap(fd, shape.num_bytes)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._places = _Places(shape)
        self._words = address_of(self._bytes)
        # Rounds that are over, and threads of the present one.
        self._round = np.zeros(2, np.int64)
        self._numbers = self._view(self._places.numbers, (_NUM_NUMBERS,), np.int64)
        # Messages that the leader has sent beside the memory.
        self.num_messages = np.zeros(1, np.int64)
        self._num_steps = 0
        self._wait = library.function("millrace_rank_wait", c_int64, (c_void_p, c_int64, c_int64))
        self._end = library.function("millrace_rank_end", None, (c_void_p,))
        self._wake = library.function("millrace_rank_wake", None, (c_void_p,))
        # Threads that have sent their rows of the present micro-batch.
        self._through = np.zeros(1, np.int64)

    def _view(self, begin: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        found: NDArray[Any] = self._bytes[begin : begin + count].view(dtype).reshape(shape)
        return found

    @property
    def leads(self) -> bool:
        """Whether this rank says what is computed, and has all logits."""
        return self.rank == 0

    @property
    def last_stage(self) -> int:
        """Of the pipeline; 0 where there is none."""
        return self.shape.degrees.pipeline - 1

    @property
    def sends(self) -> bool:
        """Whether this rank sends its stage's hidden states, which all ranks of the stage have alike."""
        return self.last_stage > 0 and self.rank == self.shape.degrees.first_of(self.stage)

    @property
    def is_over(self) -> bool:
        """Whether a rank was lost, or told to end: then what was computed since is nothing."""
        over = self._view(2 * _ALIGNMENT, (1,), np.uint32)
        return bool(over[0])

    def wake(self) -> None:
        """Ranks that sleep until a step is handed over stop waiting, and may read what was sent to them."""
        self._wake(self._words)

    def end(self) -> None:
        """Whoever waits goes on at once, for good."""
        self._end(self._words)

    # --- what the leader hands over ---

    def step_op(self, step: ctypes.Structure, kind: int) -> Op:
        """Hands a forward over, or the logits of some of its rows."""
        args = RankStepArgs(
            step=ctypes.addressof(step),
            words=self._words,
            numbers=address_of(self._numbers),
            arrays=self._words + self._places.arrays,
            rows=self._words + self._places.rows,
            adapter_rows=self._words + self._places.adapter_rows,
            adapter_blocks=self._words + self._places.adapter_blocks,
            states=self._words + self._places.states,
            messages=address_of(self.num_messages),
            kind=kind,
            most_tokens=self.shape.max_tokens,
            most_sequences=self.shape.max_sequences,
            num_ranks=self.shape.num_ranks,
        )
        return Op(self.library, "rank_step", args, self, step)

    def check(self, num_tokens: int, num_sequences: int, columns: int) -> None:
        """Raises ValueError for a step that has no room in the memory."""
        shape = self.shape
        most = shape.max_tokens, shape.max_sequences, shape.max_columns
        if num_tokens > most[0] or num_sequences > most[1] or columns > most[2]:
            raise ValueError(
                f"a step of {num_tokens} tokens, {num_sequences} sequences and {columns} block columns, but "
                f"ranks have room for {most[0]}, {most[1]} and {most[2]}"
            )

    def check_states(self, states: StateRows) -> None:
        """Raises ValueError for more snapshots than the memory has room for."""
        count, most = states.snapshot_rows.size, self.shape.state_rooms[2]
        if count > most:
            raise ValueError(f"{count} snapshots of states, but ranks have room for {most}")

    def check_rows(self, num_rows: int) -> None:
        """Raises ValueError for more rows of logits than the memory has room for."""
        if num_rows > self.shape.max_rows:
            raise ValueError(f"logits of {num_rows} rows, but ranks have room for {self.shape.max_rows}")

    # --- what the others take ---

    def wait(self, limit_s: float) -> bool:
        """Whether a step was handed over within that time; then `kind` and what follows say which."""
        if not self._wait(self._words, self._num_steps, max(1, int(1000 * limit_s))):
            return False
        self._num_steps += 1
        return True

    @property
    def kind(self) -> int:
        """FORWARD or LOGITS."""
        return int(self._numbers[0])

    @property
    def num_messages_before(self) -> int:
        """Messages that are to be read before the step is computed, since the beginning."""
        return int(self._numbers[5])

    def arrays(self) -> tuple[NDArray[np.int64], ...]:
        """A forward's token ids, positions and slots [T], query starts [S + 1], context lengths and rows of
        newest keys [S] and block tables [S, C], where the leader has put them; they hold until the step is
        computed.
        """
        tokens, sequences, columns = (int(each) for each in self._numbers[1:4])
        most = self.shape.max_sequences
        sizes = (tokens, tokens, tokens, sequences + 1, sequences, sequences, sequences * columns)
        rooms = (*3 * (self.shape.max_tokens,), most + 1, most, most, 0)
        found, begin = [], self._places.arrays
        for size, room in zip(sizes, rooms, strict=True):
            found.append(self._view(begin, (size,), np.int64))
            begin += 8 * room
        found[-1] = found[-1].reshape(sequences, columns)
        return tuple(found)

    def adapter_rows(self) -> AdapterRows | None:
        """The rows of a forward that have adapters [A], in blocks [B, 3]; None where none has."""
        if not (count := int(self._numbers[6])):
            return None
        blocks = self._view(self._places.adapter_blocks, (count, 3), np.int64)
        num_rows = int(blocks[-1, :2].sum())
        return AdapterRows(self._view(self._places.adapter_rows, (num_rows,), np.int64), blocks)

    def states(self) -> StateRows | None:
        """Where the states of a forward's sequences lie; None where these have none. Holds as `arrays`."""
        count, sequences = int(self._numbers[7]), int(self._numbers[2])
        if count < 0:
            return None
        found, begin = [], self._places.states
        sizes = (sequences, sequences + 1, count, count)
        for size, room in zip(sizes, self.shape.state_rooms, strict=True):
            found.append(self._view(begin, (size,), np.int64))
            begin += 8 * room
        slots, starts, rows, targets = found
        return StateRows(slots=slots, snapshot_starts=starts, snapshot_rows=rows, snapshot_slots=targets)

    def rows(self) -> NDArray[np.int64]:
        """The rows [R] whose logits are wanted."""
        return self._view(self._places.rows, (int(self._numbers[4]),), np.int64)

    def done_op(self) -> Op:
        """Says that this rank, behind the first, is through with a forward."""
        return Op(self.library, "rank_done", RankDoneArgs(words=self._words, rank=self.rank), self)

    # --- experts that change ranks ---

    @property
    def num_handed_over(self) -> int:
        """The number of the step that was handed over last, which wraps around."""
        return int(self._view(0, (1,), np.uint32)[0])

    @property
    def expert_counts(self) -> NDArray[np.int64]:
        """[L, X]: rows that experts got so far; the first rank of their stage counts."""
        shape = self.shape.num_sparse_layers, self.shape.num_experts
        return self._view(self._places.expert_counts, shape, np.int64)

    @property
    def expert_forms(self) -> NDArray[np.int64]:
        """[N, L, 2]: a digest of the form in which a rank has all its experts of a layer, and the bytes of
        one; zeros where they differ, or another stage has the layer.
        """
        shape = self.shape.num_ranks, self.shape.num_sparse_layers, 2
        return self._view(self._places.expert_forms, shape, np.int64)

    @property
    def settled(self) -> NDArray[np.int64]:
        """[N]: 1 of ranks whose weights none but steps read any more."""
        return self._view(self._places.settled, (self.shape.num_ranks,), np.int64)

    def piece(self, rank: int, turn: int) -> int:
        """The address of what a rank gives away of an expert's weights, in every second turn."""
        return self._words + self._places.pieces + self._places.piece_bytes * (2 * rank + turn % 2)

    # --- stages of a pipeline ---

    def micro_batch_op(self, step: int, micro_batch: ctypes.Structure, index: int, count: int) -> Op:
        """Fills in the Step `micro_batch`: some rows of the one at the address `step`."""
        starts, lengths = np.zeros((2, self.shape.max_sequences + 1), np.int64)
        adapters = np.zeros((4, self.shape.max_tokens), np.int64)
        # Of sequences and of snapshots.
        begins, snapshots = (np.zeros(size, np.int64) for size in self.shape.state_rooms[1:3])
        args = RankMicroBatchArgs(
            step=step,
            micro_batch=ctypes.addressof(micro_batch),
            query_starts=address_of(starts),
            context_lens=address_of(lengths),
            adapter_rows=address_of(adapters),
            adapter_blocks=address_of(adapters[1:]),
            snapshot_starts=address_of(begins),
            snapshot_rows=address_of(snapshots),
            index=index,
            count=count,
        )
        keep = (micro_batch, starts, lengths, adapters, begins, snapshots)
        return Op(self.library, "rank_micro_batch", args, *keep)

    def hidden(self, stage: int) -> NDArray[np.float32]:
        """[T, E]: where a stage's hidden states go. Those of the last one hold until the next forward."""
        begin = self._places.hidden + stage * self._places.part_bytes
        return self._view(begin, (self.shape.max_tokens, self.shape.hidden_size), np.float32)

    def send_op(self, step: int, rows: NDArray[np.float32], index: int, count: int) -> Op:
        """Sends this stage's hidden states [T, E] of a micro-batch of the step at that address."""
        args = self._rows_args(step, self.stage, rows, index, count)
        return Op(self.library, "rank_send", args, self, rows)

    def receive_op(
        self, step: int, stage: int, rows: NDArray[np.float32] | None, index: int, count: int
    ) -> Op:
        """Waits for what a stage sends of a micro-batch, and copies it to `rows` [T, E] where given."""
        return Op(self.library, "rank_receive", self._rows_args(step, stage, rows, index, count), self, rows)

    def _rows_args(
        self, step: int, stage: int, rows: NDArray[np.float32] | None, index: int, count: int
    ) -> ctypes.Structure:
        args: ctypes.Structure = RankRowsArgs(
            step=step,
            words=self._words,
            num_threads_through=address_of(self._through),
            room=address_of(self.hidden(stage)),
            rows=None if rows is None else address_of(rows),
            width=self.shape.hidden_size,
            stage=stage,
            index=index,
            count=count,
        )
        return args

    # --- what the ranks of a stage do together ---

    def part(self, turn: int, width: int = 0) -> NDArray[np.float32]:
        """Where this rank's part [T, E] of every second sum goes; or [T, width], which is not wider."""
        begin = self._places.parts + self._places.part_bytes * (turn % 2 * self.shape.num_ranks + self.rank)
        return self._view(begin, (self.shape.max_tokens, width or self.shape.hidden_size), np.float32)

    def parts_of_experts(self, turn: int) -> NDArray[np.float32]:
        """[expert parts, P, W]: where what experts gave goes in every second turn; the same at all ranks of a
        stage.
        """
        shape = self.shape
        begin = self._places.expert_rows + (2 * self.stage + turn % 2) * self._places.expert_bytes
        wanted = (shape.degrees.expert_parts, shape.num_places, shape.expert_width)
        return self._view(begin, wanted, np.float32)

    def meet_op(self, step: int) -> Op:
        """Waits until all of the stage have come here. It counts as a sum."""
        return Op(self.library, "rank_sum", RankSumArgs(step=step, **self._meeting()), self)

    def _meeting(self) -> dict[str, int]:
        """Who meets, as fields of the op's args."""
        degrees = self.shape.degrees
        return {
            "words": self._words,
            "round": address_of(self._round),
            "rank": self.rank,
            "first_rank": degrees.first_of(self.stage),
            "num_ranks": degrees.stage_size,
        }

    def sum_op(
        self, step: int, turn: int, out: NDArray[np.float32], *, accumulate: bool, among: int = 0
    ) -> Op:
        """out [T, E] (+)= the parts of a layer, or of another width. `step` is the Step's address; `turn`
        counts the sums of a program. `among`: ranks that follow one another, of whose parts a sum is; 0: all.
        """
        assert out.flags.c_contiguous, "rows lie one behind the other"
        degrees = self.shape.degrees
        among = among or degrees.tensor
        first_part = degrees.part_of(self.rank) // among * among
        room = turn % 2 * self.shape.num_ranks + degrees.first_of(self.stage) + first_part
        first = self._places.parts + self._places.part_bytes * room
        args = RankSumArgs(
            step=step,
            parts=self._words + first,
            out=address_of(out),
            part_stride=self._places.part_bytes // 4,
            width=out.shape[1],
            num_parts=among,
            accumulate=int(accumulate),
            **self._meeting(),
        )
        return Op(self.library, "rank_sum", args, self, out)

    def logits(self, out: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """Where this rank's logits [R, columns] go: the leader's are a part of `out` [R, V]."""
        if out is not None:
            return out[:, self.shape.columns(0)]
        columns = self.shape.columns(self.rank)
        begin = self._places.logits + (self.rank - 1) * self._places.logit_bytes
        return self._view(begin, (self.shape.max_rows, columns.stop - columns.start), np.float32)

    def logits_op(self, step: int, out: NDArray[np.float32] | None) -> Op:
        """Completes the leader's `out` [R, V]; the others say that they have written theirs."""
        args = RankLogitsArgs(
            step=step,
            words=self._words,
            parts=self._words + self._places.logits,
            out=None if out is None else address_of(out),
            part_stride=self._places.logit_bytes // 4,
            width=self.shape.vocab_size,
            rank=self.rank,
            num_ranks=self.shape.num_ranks,
        )
        return Op(self.library, "rank_logits", args, self, out)


def shared_memory(shape: RanksShape) -> int:
    """The descriptor of memory for these ranks, filled with zeros."""
    fd = os.memfd_create("millrace-ranks")
    os.ftruncate(fd, shape.num_bytes)
    return fd
