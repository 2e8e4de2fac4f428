"""What draws mean for each sequence: tokens, log-probabilities, or a failure of its own.

Shape letters: R rows of logits, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.model.back_end import Model
from engine.runner.inputs import StepInputs
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.sampling.grammar import GrammarError, GrammarMasks
from engine.sampling.logprobs import token_logprobs
from engine.types import SequenceResult, TokenLogprobs
from kernels.host import HOST, Values, on_device
from kernels.sampling.rows import Drawn, SamplingRows

# Which rows of logits a step needs, and which drafts their draws confirm.
# A sequence that samples with d drafts needs d + 1 rows: after its last known token and after each draft.
# Row i draws with the noise of its own output position, exactly as a step without drafts would. Drafts are
# accepted as long as the draw equals them, and the first draw that differs is emitted in place of its
# draft. So the output, seeded or greedy, is the same token for token as without speculation; for drafts
# that are fixed before the draw this is rejection sampling (Leviathan et al., arXiv 2211.17192), since a
# draft x is accepted with probability p(x) and replaced by a draw from p without x.
# Shape letters: R rows.


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


def no_rows() -> LogitRows:
    """Of a model that pools."""
    none = np.zeros(0, np.int64)
    return LogitRows(members=[], starts=[0], tokens=none, slots=none, positions=none)


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
        if member in inputs.guided:
            grammar_rows.extend(range(start, start + len(drafts) + 1))
    return SamplingRows(
        slots=rows.slots,
        positions=rows.positions,
        draft_rows=np.array(draft_rows, np.int64),
        draft_tokens=np.array(draft_tokens, np.int64),
        grammar_rows=np.array(grammar_rows, np.int64),
        grammar_masks=None if masks is None else masks.masks,
    )


def num_confirmed(drafts: tuple[int, ...], drawn: list[int]) -> int:
    """Drafts that the draws confirm: a member emits these, then the next draw."""
    accepted = 0
    while accepted < len(drafts) and drawn[accepted] == drafts[accepted]:
        accepted += 1
    return accepted


# Log-probabilities of prompt tokens, chunk by chunk as the prompt is computed.

# Rows of logits that are alive at once.
ROWS_AT_ONCE = 128


def prompt_logprobs(
    inputs: StepInputs, hidden: Any, model: Model, table: SequenceTable
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Index of a sequence in the step to the log-probabilities of the prompt tokens after each that was
    computed.

    A step over positions [a, b) reports the tokens at a+1..b, as far as they are prompt; the first token of a
    prompt has none. So the sequence must compute its whole prompt: no prefix hit.
    """
    found: dict[int, tuple[TokenLogprobs, ...]] = {}
    for index, (sequence, state) in enumerate(zip(inputs.scheduled, inputs.states, strict=True)):
        wanted = state.sampling.prompt_logprobs
        end = min(sequence.start + sequence.num_tokens + 1, state.num_prompt)
        if wanted is None or end <= sequence.start + 1:
            continue
        first = int(inputs.query_starts[index])
        targets = table.tokens[state.slot, sequence.start + 1 : end].tolist()
        parts: list[TokenLogprobs] = []
        for start in range(0, len(targets), ROWS_AT_ONCE):
            piece = targets[start : start + ROWS_AT_ONCE]
            logits = model.logits_of(hidden, np.arange(first + start, first + start + len(piece)))
            parts.extend(token_logprobs(logits, piece, [wanted] * len(piece), native=table.sampling.native))
        found[index] = tuple(parts)
    return found


class StepArrival(Protocol):
    """What a step drew, on its way from the device."""

    def wait(self) -> None:
        """Blocks until it is here, then completes the step's `Sampled` and puts tokens into the table."""

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """Row to the report of its token, where one was asked for."""


@dataclass(kw_only=True, eq=False)
class Sampled:
    """One step after the draw."""

    inputs: StepInputs
    rows: LogitRows
    # Both None where nobody samples; and logits where the device reports, draws until they arrive.
    logits: Values | None = None  # [R, V]
    drawn: Drawn | None = None
    masks: GrammarMasks | None = None
    # Log-probabilities of prompts, by index in the step.
    scores: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    arrival: StepArrival | None = None
    # What positions of rows have lost at most, by index in the step, where that is measured.
    lost: dict[int, tuple[float, ...]] = field(default_factory=dict)
    # Outputs of a model that pools, which draws nothing.
    pooled: list[SequenceResult] = field(default_factory=list)
    # All draws succeeded, and none is under a grammar or after drafts.
    sound: bool = False
    # Tokens are in the table of sequences; penalties count them.
    appended: bool = False
    counted: bool = False
    # When the forward began; when the rest did, where that was seen.
    began_s: float
    forwarded_s: float = 0.0


def conclude(step: Sampled, table: SequenceTable) -> list[SequenceResult]:
    """Each sampling sequence's outcome with its log-probabilities, in the order of `rows.members`. Moves
    grammars along, and makes tokens part of their sequences.
    """
    if step.drawn is None:
        return []
    outcomes = _outcomes(step, step.drawn)
    if step.arrival is None:
        reports = _reports(step, outcomes, table)
    else:
        found = step.arrival.logprobs()
        reports = {
            index: tuple(found[start + offset] for offset in range(len(outcome.token_ids)))
            for index, (start, outcome) in enumerate(zip(step.rows.starts, outcomes, strict=False))
            if start in found and outcome.token_ids
        }
    _append(step, step.drawn, outcomes, table)
    if not reports:
        return outcomes
    return [
        msgspec.structs.replace(outcome, logprobs=reports[index]) if index in reports else outcome
        for index, outcome in enumerate(outcomes)
    ]


def _outcomes(step: Sampled, drawn: Drawn) -> list[SequenceResult]:
    masks, guided = step.masks, step.inputs.guided
    if step.sound or (masks is None and step.rows.one_each and drawn.finite.all() and drawn.allowed.all()):
        # A short cut for most steps, in which each sequence gets one token and nothing else.
        ids = step.inputs.ids
        return [
            SequenceResult(ids[member], (token,))
            for member, token in zip(step.rows.members, drawn.tokens.tolist(), strict=True)
        ]
    problems = iter(masks.problems if masks else ())
    grammar_s = masks.seconds / len(masks.problems) if masks else 0.0
    return [
        _conclude_one(
            step,
            drawn,
            member,
            slice(start, end),
            next(problems) if member in guided else "",
            grammar_s,
        )
        for member, start, end in zip(step.rows.members, step.rows.starts, step.rows.starts[1:], strict=False)
    ]


def _conclude_one(
    step: Sampled, drawn: Drawn, member: int, rows: slice, problem: str, grammar_s: float
) -> SequenceResult:
    state, sequence = step.inputs.states[member], step.inputs.scheduled[member]
    said = drawn.tokens[rows].tolist()
    num_accepted = num_confirmed(sequence.draft_token_ids, said)
    tokens = tuple(said[: num_accepted + 1])
    used = slice(rows.start, rows.start + len(tokens))
    option, matcher = "", state.matcher
    # A step that was launched before the failure was known.
    problem = problem or state.failure
    if not problem and not drawn.finite[used].all():
        problem = "the model's logits are not finite"
    allowed = drawn.allowed[used]
    if not allowed.all():
        tokens = tokens[: int(allowed.argmin())]
    if not problem and matcher is not None:
        try:
            tokens = tokens[: matcher.accept(tokens)]
        except GrammarError as error:
            problem = str(error)
    # Behind the grammar's end, where drafts lead as well, nothing has to be allowed.
    if not problem and not allowed.all() and not (matcher is not None and matcher.finished):
        problem, option = _no_token_allowed(state)
    if problem:
        state.failure = problem
        return SequenceResult(sequence.sequence_id, (), failure=problem, failure_field=option)
    return SequenceResult(
        sequence.sequence_id,
        tokens,
        grammar_finished=state.matcher is not None and state.matcher.finished,
        num_drafted=len(sequence.draft_token_ids),
        num_accepted=min(num_accepted, len(tokens)),
        grammar_s=grammar_s if state.matcher is not None else 0.0,
    )


def _no_token_allowed(state: SequenceState) -> tuple[str, str]:
    """What to say when masks leave a sequence no token, and the option that is to blame, if it is one."""
    excluding = [
        name
        for name, given in (
            ("allowed_token_ids", bool(state.sampling.allowed_token_ids)),
            ("logit_bias", -math.inf in state.sampling.logit_bias.values()),
        )
        if given
    ]
    if not excluding:
        return "the grammar allows no token", ""
    others = [*excluding[1:], *(["the grammar"] if state.matcher is not None else [])]
    return (
        f"no token is allowed by it and by {' and '.join(others) or 'the model'} at this position of the "
        "answer; allow tokens that can continue it, or leave one of them out",
        f"sampling.{excluding[0]}",
    )


def _reports(
    step: Sampled, outcomes: list[SequenceResult], table: SequenceTable
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Log-probabilities of each outcome's tokens, where they were asked for.

    Beams continue with the alternatives, so for them those that masks exclude are left out.
    """
    wanted, slots = table.sampling.logprobs, step.rows.slots
    if not wanted:
        return {}
    picked = [
        (index, start + offset, token, wanted[int(slots[start])])
        for index, (start, outcome) in enumerate(zip(step.rows.starts, outcomes, strict=False))
        if int(slots[start]) in wanted
        for offset, token in enumerate(outcome.token_ids)
    ]
    if not picked:
        return {}
    assert step.logits is not None, "rows were drawn"
    assert step.drawn is not None, "as above"
    device: Any = HOST if isinstance(step.logits, np.ndarray) else step.logits.device
    rows = on_device(np.array([row for _, row, _, _ in picked], np.int64), device)
    beams = [step.inputs.states[step.rows.members[index]].sampling.beam_width > 0 for index, *_ in picked]
    excluded = None
    if any(beams):
        masked = step.drawn.processed[rows] == -math.inf
        excluded = masked & on_device(np.array(beams), device)[:, None]
    tokens, counts = [token for *_, token, _ in picked], [count for *_, count in picked]
    found = token_logprobs(step.logits[rows], tokens, counts, excluded, native=table.sampling.native)
    reports: dict[int, tuple[TokenLogprobs, ...]] = {}
    for (index, *_), entry in zip(picked, found, strict=True):
        reports[index] = (*reports.get(index, ()), entry)
    return reports


def _append(step: Sampled, drawn: Drawn, outcomes: list[SequenceResult], table: SequenceTable) -> None:
    """Makes the new tokens part of their sequences, as far as they are not."""
    rows = step.rows
    whole = step.arrival is None and step.rows.one_each
    if step.appended or (whole and all(outcome.token_ids for outcome in outcomes)):
        if not step.appended:
            table.append_one_each(rows.slots, drawn.tokens)
        if not step.counted:
            table.sampling.append(rows.slots, drawn.tokens)
        return
    slots: list[int] = []
    tokens: list[int] = []
    for member, outcome in zip(rows.members, outcomes, strict=True):
        if not step.inputs.is_alive(member, table):
            continue
        slot = int(step.inputs.slots[member])
        table.append(slot, outcome.token_ids)
        slots.extend([slot] * len(outcome.token_ids))
        tokens.extend(outcome.token_ids)
    if not step.counted:
        table.sampling.append(np.array(slots, np.int64), np.array(tokens, np.int64))
