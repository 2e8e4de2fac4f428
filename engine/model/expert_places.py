"""Where the experts of a layer stand among the ranks of a stage, and how two of them change places.

An expert's position says which rank holds it, and where. Routers and sums know experts by their numbers: a
token's experts are chosen, and added up in the order of its choices, as ever: positions change no bit.

Weights go over piece by piece, one before each of the steps that follow, so that no step waits long. Each of
two ranks writes what it gives away into the memory that they share, and reads what the other one wrote before
the last step; in front of the step that finds all of it, the ranks of the stage change positions. Nobody
waits: the leader hands a step over when all are through with the one before (kernels/ranks).

A rank has room for one expert beyond its own, which a new one takes, and whose place is then that room. So no
step finds an expert in parts.

Shape letters: X experts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.model.records import Layer, SparseFeedForward
from kernels.experts.native import WeightsByPlace
from kernels.linear.packed import Arena, PackedWeight, PackedWeightStruct
from kernels.native.library import NativeLibrary
from kernels.ranks.native import Ranks

# Addresses of what a weight consists of; what is no address says how it lies there.
_POINTERS = tuple(name for name, kind in PackedWeightStruct._fields_ if kind is ctypes.c_void_p)
_NUMBERS = tuple(name for name, kind in PackedWeightStruct._fields_ if kind is not ctypes.c_void_p)


class ExpertForm(NamedTuple):
    """What all experts of a layer that a rank holds have in common: by part of an expert, the bytes of each
    piece of memory by its name in the struct, and a digest of that and of how they lie there.
    """

    sizes: tuple[Mapping[str, int], ...]
    digest: int

    @property
    def num_bytes(self) -> int:
        """Of one expert."""
        return sum(sum(part.values()) for part in self.sizes)


@dataclass(kw_only=True)
class ExpertPlaces:
    """A layer's experts on one rank."""

    # By expert [X]: its place among those of all ranks of the stage, group by group.
    positions: NDArray[np.int64]
    # The weights of those that are held here.
    weights: WeightsByPlace
    # None where they differ, and stay.
    form: ExpertForm | None
    # The rows that each expert got so far [X], where this rank counts.
    counts: NDArray[np.int64] | None

    def group_of(self, expert: int) -> int:
        """The group of ranks that holds an expert."""
        return int(self.positions[expert]) // self.num_held

    @property
    def num_held(self) -> int:
        """Experts of one group."""
        return len(self.weights.by_part[0])


class ExpertMove(NamedTuple):
    """In front of a step: two experts of different groups that change places, and how far they have come."""

    # Of all layers with experts, those of earlier stages first.
    layer: int
    experts: tuple[int, int]
    # Written before this step, and read before the next one; after the last of them places change.
    piece: int
    num_pieces: int


def _places_of(layers: Sequence[Layer], ranks: Ranks) -> list[ExpertPlaces]:
    """Those of all layers with experts, which stand by their numbers. Tells the leader their forms."""
    found, begin = [], ranks.shape.sparse_cuts[ranks.stage]
    counts = ranks.shape.degrees.first_of(ranks.stage) == ranks.rank
    for index, sparse in enumerate((each.sparse for each in layers if each.sparse is not None), begin):
        form = _form_of(sparse)
        sparse.places = ExpertPlaces(
            positions=np.arange(sparse.spec.num_experts),
            weights=WeightsByPlace(
                [expert.gate_up.packed_parts for expert in sparse.experts],
                [expert.down.packed for expert in sparse.experts],
            ),
            form=form,
            counts=ranks.expert_counts[index] if counts else None,
        )
        ranks.expert_forms[ranks.rank, index] = (0, 0) if form is None else (form.digest, form.num_bytes)
        found.append(sparse.places)
    return found


def _form_of(sparse: SparseFeedForward) -> ExpertForm | None:
    """None where experts differ in it, or have memory whose size nobody knows."""
    parts = [(*expert.gate_up.packed_parts, expert.down.packed) for expert in sparse.experts]
    described = {tuple(map(_described, each)) for each in parts}
    if len(described) != 1 or not all(map(_is_counted, parts[0])):
        return None
    digest = blake2b(repr(described.pop()).encode(), digest_size=7).digest()
    return ExpertForm(tuple(each.sizes for each in parts[0]), 1 + int.from_bytes(digest))


def _described(weight: PackedWeight) -> tuple[Any, ...]:
    numbers = tuple(int(getattr(weight.struct, name)) for name in _NUMBERS)
    return numbers, tuple(sorted(weight.sizes.items()))


def _is_counted(weight: PackedWeight) -> bool:
    return {name for name in _POINTERS if getattr(weight.struct, name)} == set(weight.sizes)


class ExpertExchange:
    """One rank's part in moves. `take` what the leader says, each before the step that it said it for."""

    def __init__(self, layers: Sequence[Layer], ranks: Ranks, library: NativeLibrary) -> None:
        """Raises MemoryError where there is none for one expert more."""
        self._places, self._ranks = _places_of(layers, ranks), ranks
        self._arena = Arena(library)
        # By form, an expert that no step computes with. What is not written takes no memory.
        self._spares: dict[int, list[Any]] = {}
        for places in self._places:
            if places.form is not None and places.form.digest not in self._spares:
                self._spares[places.form.digest] = [self._room(sizes) for sizes in places.form.sizes]

    def _room(self, sizes: Mapping[str, int]) -> Any:
        return PackedWeightStruct(**{name: self._arena.take(size) for name, size in sizes.items()})

    def take(self, move: ExpertMove) -> None:
        """Does this rank's part of a move."""
        ranks, layer = self._ranks, move.layer - self._ranks.shape.sparse_cuts[self._ranks.stage]
        if not 0 <= layer < len(self._places):
            # Another stage's.
            return
        places, degrees = self._places[layer], ranks.shape.degrees
        groups = [places.group_of(expert) for expert in move.experts]
        own = degrees.group_of(ranks.rank)
        if own in groups:
            leaving, other = move.experts[groups.index(own)], groups[1 - groups.index(own)]
            partner = ranks.rank + (other - own) * degrees.expert_parts
            place = int(places.positions[leaving]) - own * places.num_held
            self._exchange(places, place, partner, move)
        if move.piece == move.num_pieces:
            first, second = move.experts
            places.positions[[first, second]] = places.positions[[second, first]]

    def _exchange(self, places: ExpertPlaces, place: int, partner: int, move: ExpertMove) -> None:
        form, ranks, size = places.form, self._ranks, self._ranks.shape.piece_bytes
        assert form is not None, "the leader moves no others"
        leaving, spare = [each[place] for each in places.weights.by_part], self._spares[form.digest]
        if move.piece < move.num_pieces:
            room = ranks.piece(ranks.rank, move.piece)
            for address, at, count in _cut(leaving, form, move.piece * size, size):
                ctypes.memmove(room + at, address, count)
        if move.piece:
            room = ranks.piece(partner, move.piece - 1)
            for address, at, count in _cut(spare, form, (move.piece - 1) * size, size):
                ctypes.memmove(address, room + at, count)
        if move.piece == move.num_pieces:
            for struct, other, sizes in zip(leaving, spare, form.sizes, strict=True):
                for name in sizes:
                    here, there = getattr(struct, name), getattr(other, name)
                    setattr(struct, name, there)
                    setattr(other, name, here)


def _cut(
    structs: Sequence[Any], form: ExpertForm, begin: int, num_bytes: int
) -> Iterator[tuple[int, int, int]]:
    """Of the memory of an expert, whose pieces follow one another, the part [begin, begin + num_bytes): the
    address of each run, where it lies in the part, and its bytes.
    """
    first, end = 0, begin + num_bytes
    for struct, sizes in zip(structs, form.sizes, strict=True):
        for name in sorted(sizes):
            low, high = max(first, begin), min(first + sizes[name], end)
            if low < high:
                yield getattr(struct, name) + low - first, low - begin, high - low
            first += sizes[name]
