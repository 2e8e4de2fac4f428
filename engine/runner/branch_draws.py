"""What a step with branches draws (see speculation/branches): further drafts beside those of the plan, and
the likeliest token behind guesses.

A branch's rows draw with the noise of their own output positions, as the plan's rows do, so all paths that
hold say the same tokens; the longest of them counts. It takes the place of the plan's drafts: its draws and
hidden states those of their rows, and its keys and values their slots.

Shape letters: R rows of the plan, D rows of drafts in branches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.model.back_end import Model
from engine.model.native_decoder import NativeDecoder
from engine.runner.kv_storage import KvStorage, SlotMoves
from engine.runner.outcomes import LogitRows, Sampled, num_confirmed, sampling_rows
from engine.runner.sequence_table import SequenceTable
from engine.runner.speculation.branches import DRAFTS, BranchRows
from engine.sampling.table import sample
from kernels.sampling.rows import Drawn, SamplingRows

# Of a draft that there is not.
_NO_TOKEN = -1


def draw_with_branches(
    step: Sampled, branches: BranchRows, hidden: Any, model: Model, table: SequenceTable, storage: KvStorage
) -> None:
    """Draws what rows and branches of a step ask for, and moves what holds of branches to its sequences."""
    count = step.rows.tokens.size
    first = int(step.inputs.query_starts[-1])
    tokens = np.split(first + np.arange(branches.num_rows), np.cumsum(branches.lens)[:-1])
    pairs = list(zip(tokens, branches.branches, strict=True))
    drafted = [own for own, branch in pairs if branch.is_draft]
    ends = [own[-1:] for own, branch in pairs if not branch.is_draft]
    rows = np.concatenate((step.rows.tokens, *drafted, *ends))
    logits = model.logits_of(hidden, rows)
    num_drawn = rows.size - len(ends)
    paths = _paths(step.rows, branches)
    asked = _behind(sampling_rows(step.inputs, step.rows, step.masks), step.rows, branches, paths)
    drawn = sample(logits[:num_drawn], table.sampling, asked)
    branches.guessed = np.argmax(logits[num_drawn:], axis=1).tolist()
    moves = []
    for member, (index, held) in _longest(step, branches, paths, drawn).items():
        start, path = step.rows.starts[step.rows.members.index(member)], paths[index]
        own = slice(start, start + len(path))
        for values in (drawn.tokens, drawn.finite, drawn.allowed, drawn.processed, logits):
            values[own] = values[path]
        _replace_drafts(step, member, branches.texts[index])
        moves.append(branches.moves(index, held))
        _move_features(model, rows[own], rows[path])
    if moves:
        storage.copy_slots(SlotMoves.of(moves))
    step.logits = logits[:count]
    step.drawn = Drawn(
        tokens=drawn.tokens[:count],
        finite=drawn.finite[:count],
        allowed=drawn.allowed[:count],
        processed=drawn.processed[:count],
    )


def _move_features(model: Model, own: NDArray[np.int64], path: NDArray[np.int64]) -> None:
    """Hidden states that are kept for who drafts from them are those of what holds."""
    assert isinstance(model, NativeDecoder), "others have no branches"
    for captured in model.captured:
        captured[own] = captured[path]


def _paths(rows: LogitRows, branches: BranchRows) -> dict[int, list[int]]:
    """Rows [R + D] of each draft that is a branch, from the sequence's last token to its own end."""
    paths: dict[int, list[int]] = {}
    at = rows.tokens.size
    for index, (branch, member) in enumerate(zip(branches.branches, branches.members, strict=True)):
        if not branch.is_draft:
            continue
        if branches.parents[index] == DRAFTS:
            place = rows.members.index(member)
            parent = list(range(rows.starts[place], rows.starts[place + 1]))
        else:
            parent = paths[branches.parents[index]]
        paths[index] = [*parent[: branch.num_shared + 1], *range(at, at + len(branch.tokens))]
        at += len(branch.tokens)
    return paths


def _behind(
    asked: SamplingRows, rows: LogitRows, branches: BranchRows, paths: dict[int, list[int]]
) -> SamplingRows:
    """What the plan's rows ask for, and behind them drafts of branches."""
    if not paths:
        return asked
    firsts, depths = [], []
    draft_rows: list[int] = []
    draft_tokens: list[int] = []
    for index, path in paths.items():
        text = branches.texts[index]
        for depth in range(branches.branches[index].num_shared + 1, len(text) + 1):
            firsts.append(path[0])
            depths.append(depth)
            draft_rows += [path[depth]] * depth
            draft_tokens += text[:depth]
    return replace(
        asked,
        slots=np.concatenate((asked.slots, rows.slots[firsts])),
        positions=np.concatenate((asked.positions, rows.positions[firsts] + np.array(depths, np.int64))),
        draft_rows=np.concatenate((asked.draft_rows, np.array(draft_rows, np.int64))),
        draft_tokens=np.concatenate((asked.draft_tokens, np.array(draft_tokens, np.int64))),
    )


def _longest(
    step: Sampled, branches: BranchRows, paths: dict[int, list[int]], drawn: Drawn
) -> dict[int, tuple[int, int]]:
    """By member the branch of which more holds than of the plan's drafts, and how much."""
    rows, found = step.rows, {}
    most: dict[int, int] = {}
    for index, path in paths.items():
        member = branches.members[index]
        if member not in most:
            place = rows.members.index(member)
            said = drawn.tokens[rows.starts[place] : rows.starts[place + 1]].tolist()
            most[member] = num_confirmed(step.inputs.scheduled[member].draft_token_ids, said)
        held = num_confirmed(branches.texts[index], drawn.tokens[path].tolist())
        if held > most[member]:
            most[member], found[member] = held, (index, held)
    return found


def _replace_drafts(step: Sampled, member: int, text: tuple[int, ...]) -> None:
    """A branch's text takes the place of the plan's drafts, of which there are as many or more."""
    scheduled = list(step.inputs.scheduled)
    rest = len(scheduled[member].draft_token_ids) - len(text)
    tokens = (*text, *[_NO_TOKEN] * rest)
    scheduled[member] = msgspec.structs.replace(scheduled[member], draft_token_ids=tokens)
    step.inputs.scheduled = scheduled
