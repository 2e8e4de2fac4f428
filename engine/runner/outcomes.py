"""What draws mean for each sequence: tokens, log-probabilities, or a failure of its own.

Shape letters: R rows of logits, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from engine.kernels.host import HOST, Values
from engine.kernels.transfer import on_device
from engine.runner.inputs import StepInputs
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.runner.verification import LogitRows, confirmed
from engine.sampling.grammar import GrammarError, GrammarMasks
from engine.sampling.logprobs import token_logprobs
from engine.sampling.sampler import Drawn
from engine.types import SequenceResult, TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class SampledStep:
    """One step after the draw."""

    inputs: StepInputs
    rows: LogitRows
    logits: Values  # [R, V]
    drawn: Drawn
    masks: GrammarMasks | None

    @property
    def one_row_each(self) -> bool:
        """Whether nobody has drafts."""
        return len(self.rows.members) == self.rows.tokens.size


def conclude(step: SampledStep) -> list[SequenceResult]:
    """Each sampling sequence's outcome, in the order of `rows.members`. Moves grammars along."""
    drawn = step.drawn
    if step.masks is None and step.one_row_each and drawn.finite.all() and drawn.allowed.all():
        return [
            SequenceResult(step.inputs.scheduled[member].sequence_id, (token,))
            for member, token in zip(step.rows.members, drawn.tokens.tolist(), strict=True)
        ]
    problems = iter(step.masks.problems if step.masks else ())
    grammar_s = step.masks.seconds / len(step.masks.problems) if step.masks else 0.0
    return [
        _conclude_one(
            step,
            member,
            slice(start, end),
            next(problems) if step.inputs.states[member].matcher is not None else "",
            grammar_s,
        )
        for member, start, end in zip(step.rows.members, step.rows.starts, step.rows.starts[1:], strict=False)
    ]


def _conclude_one(
    step: SampledStep, member: int, rows: slice, problem: str, grammar_s: float
) -> SequenceResult:
    state, sequence = step.inputs.states[member], step.inputs.scheduled[member]
    tokens = confirmed(sequence.draft_token_ids, step.drawn.tokens[rows].tolist())
    num_confirmed = len(tokens) - 1
    used = slice(rows.start, rows.start + len(tokens))
    field, matcher = "", state.matcher
    if not problem and not step.drawn.finite[used].all():
        problem = "the model's logits are not finite"
    allowed = step.drawn.allowed[used]
    if not allowed.all():
        tokens = tokens[: int(allowed.argmin())]
    if not problem and matcher is not None:
        try:
            tokens = tokens[: matcher.accept(tokens)]
        except GrammarError as error:
            problem = str(error)
    # Behind the grammar's end, where drafts lead as well, nothing has to be allowed.
    if not problem and not allowed.all() and not (matcher is not None and matcher.finished):
        problem, field = no_token_allowed(state)
    if problem:
        state.failure = problem
        return SequenceResult(sequence.sequence_id, (), failure=problem, failure_field=field)
    return SequenceResult(
        sequence.sequence_id,
        tokens,
        grammar_finished=state.matcher is not None and state.matcher.finished,
        num_drafted=len(sequence.draft_token_ids),
        num_accepted=min(num_confirmed, len(tokens)),
        grammar_s=grammar_s if state.matcher is not None else 0.0,
    )


def no_token_allowed(state: SequenceState) -> tuple[str, str]:
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
        f"no token is allowed by it and by {' and '.join(others) or 'the model'} at this place of the "
        "answer; allow tokens that can continue it, or leave one of them out",
        f"sampling.{excluding[0]}",
    )


def logprob_reports(
    step: SampledStep, outcomes: list[SequenceResult], table: SequenceTable
) -> list[tuple[TokenLogprobs, ...]]:
    """Log-probabilities of each outcome's tokens, where they were asked for.

    Beams continue with the alternatives, so for them those that masks exclude are left out.
    """
    wanted, slots = table.sampling.logprobs, step.rows.slots
    if not wanted:
        return [()] * len(outcomes)
    picked = [
        (index, start + place, token, wanted[int(slots[start])])
        for index, (start, outcome) in enumerate(zip(step.rows.starts, outcomes, strict=False))
        if int(slots[start]) in wanted
        for place, token in enumerate(outcome.token_ids)
    ]
    reports: list[tuple[TokenLogprobs, ...]] = [()] * len(outcomes)
    if not picked:
        return reports
    device: Any = HOST if isinstance(step.logits, np.ndarray) else step.logits.device
    rows = on_device(np.array([row for _, row, _, _ in picked], np.int64), device)
    beams = [step.inputs.states[step.rows.members[index]].sampling.beam_width > 0 for index, *_ in picked]
    excluded = None
    if any(beams):
        masked = step.drawn.processed[rows] == -math.inf
        excluded = masked & on_device(np.array(beams), device)[:, None]
    tokens, counts = [token for *_, token, _ in picked], [count for *_, count in picked]
    found = token_logprobs(step.logits[rows], tokens, counts, excluded, native=table.sampling.native)
    for (index, *_), entry in zip(picked, found, strict=True):
        reports[index] = (*reports[index], entry)
    return reports


def with_reports(
    outcome: SequenceResult,
    *,
    logprobs: tuple[TokenLogprobs, ...],
    prompt_logprobs: tuple[TokenLogprobs, ...],
    drafts: tuple[int, ...],
) -> SequenceResult:
    """The outcome with its log-probabilities and proposals."""
    if not logprobs and not prompt_logprobs and not drafts:
        return outcome
    return msgspec.structs.replace(
        outcome, logprobs=logprobs, prompt_logprobs=prompt_logprobs, next_draft_token_ids=drafts
    )
