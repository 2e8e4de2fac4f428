"""Rows that a step computes beside a sequence's own: further drafts, and guesses that nobody verifies.

A branch is a chain of tokens behind a sequence's last one, or behind the first of another branch's; together
they are a tree. Attention visits a row's history in the order of its positions, and its sums depend on that
order. So a branch is a sequence of its own for the model: it shares the blocks of what is behind it, and has
the block in which it begins for itself, into which each layer copies what others wrote there
(`ForwardBatch.slot_copies`). Its rows have the bits that they had if its tokens were the sequence's.

Blocks that branches write are scratch blocks, of which each slot of the table has its own. What holds of a
branch is moved to the sequence's blocks when its draws are known (`branch_draws`).

Shape letters: B branches, T their tokens, M copies, C blocks of the longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.runner.kv_storage import SlotMoves
from kernels.attention.ragged import RaggedBatch

# The parent of a branch that begins at the sequence's last token or at a draft of the plan.
DRAFTS = -1


@dataclass(frozen=True, kw_only=True)
class DraftBranch:
    """Tokens behind a sequence's last one, of which the first few are another branch's."""

    # Those that are its own.
    tokens: tuple[int, ...]
    # An earlier branch of the same sequence, and how many tokens behind the last one are as there.
    parent: int = DRAFTS
    num_shared: int = 0
    # Whether it is verified; of others only the likeliest token behind the end is told.
    is_draft: bool = False


@dataclass(frozen=True, kw_only=True)
class BranchRoom:
    """Where branches may be written: the first of the scratch blocks, and how many each of the first slots of
    the table has; and the most rows of a step, all of them together.
    """

    first_block: int
    blocks_each: int
    num_slots: int
    most_rows: int
    # The first of the rows of newest keys, and how many each has.
    first_recent: int
    recent_each: int

    def of(self, slot: int) -> Iterator[int]:
        """A slot's blocks."""
        first = self.first_block + slot * self.blocks_each
        return iter(range(first, first + self.blocks_each))

    def recent_of(self, slot: int) -> Iterator[int]:
        """A slot's rows of newest keys, as in ForwardBatch."""
        first = self.first_recent + slot * self.recent_each
        return iter(range(2 * first, 2 * (first + self.recent_each), 2))


class SlotPath:
    """Where a history lies: its blocks, from where on it is computed in the step and not its parent's, by
    which rows, and where its newest keys lie whole.
    """

    def __init__(
        self,
        table: NDArray[np.int64],
        size: int,
        begin: int,
        row: int,
        recent: int,
        parent: SlotPath | None = None,
    ) -> None:
        self.table, self.size, self.begin, self.parent = table, size, begin, parent
        self.row, self.recent = row, recent

    def slots(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slots of positions in these blocks."""
        found: NDArray[np.int64] = self.table[positions // self.size] * self.size + positions % self.size
        return found

    def recents(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places of whole keys of positions, where they are among the newest."""
        found: NDArray[np.int64] = (self.recent ^ (positions // self.size & 1)) * self.size
        return found + positions % self.size

    def origins(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Slots into which the rows of positions write themselves, and their keys' places."""
        if self.parent is None or not positions.size or positions[0] >= self.begin:
            return self.slots(positions), self.recents(positions)
        before, own = self._apart(positions)
        parts = zip(self.parent.origins(before), (self.slots(own), self.recents(own)), strict=True)
        slots, recents = (np.concatenate(part) for part in parts)
        return slots, recents

    def sources(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where attention of the step finds their keys whole, as in ForwardBatch.recent_copies."""
        before, own = self._apart(positions)
        earlier = ~self.recents(before) if self.parent is None else self.parent.sources(before)
        return np.concatenate((earlier, self.row + own - self.begin))

    def _apart(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Those that are its parent's, or before the step, and its own."""
        return positions[positions < self.begin], positions[positions >= self.begin]


def _elsewhere(sources: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.int64]:
    """[M, 2] of pairs, those that are two."""
    pairs = np.stack((sources, targets), axis=1)
    return np.asarray(pairs[sources != targets])


@dataclass(kw_only=True)
class BranchRows:
    """Branches of a step, in the order of its sequences; their rows lie behind those of the plan."""

    # [B] index of the sequence in the step, that of the parent among these branches, position of the first
    # token, and the text behind the last token, what is shared included.
    members: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    branches: list[DraftBranch] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    texts: list[tuple[int, ...]] = field(default_factory=list)
    paths: list[SlotPath] = field(default_factory=list)
    # (source, destination) slots, in parts; and the same of whole keys.
    copies: list[NDArray[np.int64]] = field(default_factory=list)
    whole_copies: list[NDArray[np.int64]] = field(default_factory=list)
    # Of the step where theirs begin, and how many there are.
    first_row: int = 0
    num_rows: int = 0
    # Likeliest token behind each branch that is no draft, in their order; known once the step is computed.
    guessed: list[int] = field(default_factory=list)

    def add(
        self,
        member: int,
        branches: Sequence[DraftBranch],
        drafts: tuple[int, ...],
        last: int,
        root: SlotPath,
        blocks: Iterator[int],
        recents: Iterator[int],
    ) -> None:
        """Branches of a sequence whose last token is at the position `last`, with the plan's drafts behind
        it; `recents` have a row of newest keys for each.
        """
        first = len(self.branches)
        for branch in branches:
            parent, text, index = root, drafts, DRAFTS
            if branch.parent != DRAFTS:
                index = first + branch.parent
                parent, text = self.paths[index], self.texts[index]
            begin = last + 1 + branch.num_shared
            end = begin + len(branch.tokens)
            first_block = begin // root.size
            own = [next(blocks) for _ in range(first_block, -(-end // root.size))]
            table, row = np.concatenate((parent.table[:first_block], own)), self.first_row + self.num_rows
            path = SlotPath(table, root.size, begin, row, next(recents), parent)
            others = np.arange(first_block * root.size, begin)
            self.copies.append(np.stack((parent.origins(others)[0], path.slots(others)), axis=1))
            self.whole_copies.append(np.stack((parent.sources(others), path.recents(others)), axis=1))
            self.members.append(member)
            self.parents.append(index)
            self.branches.append(branch)
            self.begins.append(begin)
            self.texts.append((*text[: branch.num_shared], *branch.tokens))
            self.paths.append(path)
            self.num_rows += len(branch.tokens)

    @property
    def lens(self) -> NDArray[np.int64]:
        """[B] own tokens."""
        return np.array([len(each.tokens) for each in self.branches], np.int64)

    def fill(self, rows: NDArray[np.int64]) -> None:
        """Writes token ids, positions and slots [3, T] of all rows."""
        at = 0
        for branch, begin, path in zip(self.branches, self.begins, self.paths, strict=True):
            end = at + len(branch.tokens)
            rows[0, at:end] = branch.tokens
            rows[1, at:end] = positions = np.arange(begin, begin + len(branch.tokens))
            rows[2, at:end] = path.slots(positions)
            at = end

    def behind(self, ragged: RaggedBatch) -> RaggedBatch:
        """The step as attention sees it, with a sequence more for each branch."""
        ends = np.array(self.begins, np.int64) + self.lens
        width = max(ragged.block_tables.shape[1], *(path.table.size for path in self.paths))
        num_sequences = ragged.context_lens.size
        tables = np.zeros((num_sequences + len(self.paths), width), np.int64)
        tables[:num_sequences, : ragged.block_tables.shape[1]] = ragged.block_tables
        for row, path in enumerate(self.paths, num_sequences):
            tables[row, : path.table.size] = path.table
        starts = ragged.query_starts
        return RaggedBatch(
            query_starts=np.concatenate((starts, starts[-1] + np.cumsum(self.lens))),
            context_lens=np.concatenate((ragged.context_lens, ends)),
            block_tables=tables,
            block_size=ragged.block_size,
        )

    def moves(self, index: int, num_tokens: int) -> SlotMoves:
        """From where so many tokens behind the last one, as a branch has them, move to where they are the
        sequence's own.
        """
        path = root = self.paths[index]
        while root.parent is not None:
            root = root.parent
        first = self.begins[index] - self.branches[index].num_shared
        positions = np.arange(first, first + num_tokens)
        slots, recents = path.origins(positions)
        full = np.arange(first // root.size, (first + num_tokens) // root.size)
        return SlotMoves(
            _elsewhere(slots, root.slots(positions)),
            _elsewhere(recents, root.recents(positions)),
            _elsewhere(path.table[full], root.table[full]),
        )

    @property
    def recent_copies(self) -> NDArray[np.int64]:
        """[M, 2] the same of whole keys, as in ForwardBatch."""
        return np.ascontiguousarray(np.concatenate(self.whole_copies))

    @property
    def slot_copies(self) -> NDArray[np.int64]:
        """[M, 2] source and destination."""
        return np.ascontiguousarray(np.concatenate(self.copies))
