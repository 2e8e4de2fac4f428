"""Which rows of logits a step needs, and which drafts their draws confirm.

A sequence that samples with d drafts needs d + 1 rows: after its last known token and after each draft. Row i
draws with the noise of its own output position, exactly as a step without drafts would. Drafts are accepted
as long as the draw equals them, and the first draw that differs is emitted in place of its draft. So the
output, seeded or greedy, is the same token for token as without speculation; for drafts that are fixed before
the draw this is rejection sampling (Leviathan et al., arXiv 2211.17192), since a draft x is accepted with
probability p(x) and replaced by a draw from p without x.

Shape letters: R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.runner.inputs import StepInputs
from engine.sampling.grammar import GrammarMasks
from kernels.sampling.rows import SamplingRows


@dataclass(frozen=True, kw_only=True)
class LogitRows:
    """Rows of a step, grouped by sequence."""

    # Index of each sampling sequence in the step.
    members: list[int]
    # First row of each member, and the end.
    starts: list[int]
    tokens: NDArray[np.int64]  # [R] index on the token axis
    slots: NDArray[np.int64]  # [R]
    positions: NDArray[np.int64]  # [R] output tokens before the draw

    @property
    def one_each(self) -> bool:
        """Whether nobody has drafts."""
        return len(self.members) == self.tokens.size

    @property
    def member_slots(self) -> NDArray[np.int64]:
        """Slot of each member."""
        return self.slots if self.one_each else self.slots[self.starts[:-1]]

    @property
    def num_drafts(self) -> NDArray[np.int64] | int:
        """Drafts of each member."""
        return 0 if self.one_each else np.diff(self.starts) - 1


def logit_rows(inputs: StepInputs) -> LogitRows:
    """The rows whose logits are wanted. Who samples computes up to the last token that is known, or drawn by
    the step before.
    """
    count = len(inputs.scheduled)
    if inputs.query_starts[-1] == count == sum(each.samples for each in inputs.scheduled):
        # Plain decoding: a row for each sequence, which is its only token.
        num_prompt = np.fromiter((state.num_prompt for state in inputs.states), np.int64, count)
        return LogitRows(
            members=list(range(count)),
            starts=list(range(count + 1)),
            tokens=inputs.query_starts[:-1],
            slots=inputs.slots,
            positions=inputs.ends - num_prompt,
        )
    members = [index for index, sequence in enumerate(inputs.scheduled) if sequence.samples]
    sampling = np.array(members, np.int64)
    slots, ends = inputs.slots[sampling], inputs.query_starts[sampling + 1]
    num_prompt = np.array([inputs.states[index].num_prompt for index in members], np.int64)
    num_drafts = np.array([len(inputs.scheduled[index].draft_token_ids) for index in members], np.int64)
    first_rows, first_outputs = ends - num_drafts - 1, inputs.ends[sampling] - num_drafts - num_prompt
    counts = num_drafts + 1
    bounds = np.concatenate(([0], np.cumsum(counts)))
    within = np.arange(int(bounds[-1])) - np.repeat(bounds[:-1], counts)
    return LogitRows(
        members=members,
        starts=bounds.tolist(),
        tokens=np.repeat(first_rows, counts) + within,
        slots=np.repeat(slots, counts),
        positions=np.repeat(first_outputs, counts) + within,
    )


def sampling_rows(inputs: StepInputs, rows: LogitRows, masks: GrammarMasks | None) -> SamplingRows:
    """What the sampler must respect in each row. Grammar rows are in the order in which masks were asked."""
    if rows.one_each and masks is None:
        return SamplingRows(slots=rows.slots, positions=rows.positions)
    draft_rows: list[int] = []
    draft_tokens: list[int] = []
    grammar_rows: list[int] = []
    for member, start in zip(rows.members, rows.starts, strict=False):
        drafts = inputs.scheduled[member].draft_token_ids
        for row in range(1, len(drafts) + 1):
            draft_rows.extend([start + row] * row)
            draft_tokens.extend(drafts[:row])
        if inputs.states[member].matcher is not None:
            grammar_rows.extend(range(start, start + len(drafts) + 1))
    return SamplingRows(
        slots=rows.slots,
        positions=rows.positions,
        draft_rows=np.array(draft_rows, np.int64),
        draft_tokens=np.array(draft_tokens, np.int64),
        grammar_rows=np.array(grammar_rows, np.int64),
        grammar_masks=None if masks is None else masks.masks,
    )


def confirmed(drafts: tuple[int, ...], drawn: list[int]) -> tuple[int, ...]:
    """The tokens that a member emits: drafts that the draws confirm, then the next draw."""
    accepted = 0
    while accepted < len(drafts) and drawn[accepted] == drafts[accepted]:
        accepted += 1
    return tuple(drawn[: accepted + 1])
