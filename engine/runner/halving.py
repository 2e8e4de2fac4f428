"""A step in two halves, for when it does not fit into memory as a whole.

Rows do not depend on each other, and a prompt may be computed in chunks of any size, so the halves give what
the whole would have given.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.types import ScheduledSequence, SequenceResult

Half = list[ScheduledSequence]


def halves(scheduled: Sequence[ScheduledSequence]) -> tuple[Half, Half] | None:
    """The first half of a step and the second, to be computed in this order; None for a single token."""
    if len(scheduled) > 1:
        middle = len(scheduled) // 2
        return list(scheduled[:middle]), list(scheduled[middle:])
    if not scheduled:
        return None
    (whole,) = scheduled
    # Drafts are verified in one piece.
    first = (whole.num_tokens - len(whole.draft_token_ids)) // 2
    if first < 1:
        return None
    head = ScheduledSequence(whole.sequence_id, whole.start, first, (), False)
    tail = ScheduledSequence(
        whole.sequence_id,
        whole.start + first,
        whole.num_tokens - first,
        (),
        whole.samples,
        whole.draft_token_ids,
    )
    return [head], [tail]


def joined(first: Sequence[SequenceResult], second: Sequence[SequenceResult]) -> list[SequenceResult]:
    """Results of two halves; a sequence that is in both has one, with the scores of both parts."""
    found = {result.sequence_id: result for result in first}
    for result in second:
        before = found.get(result.sequence_id)
        if before is None:
            found[result.sequence_id] = result
        elif not before.failure:
            scores = (*before.prompt_logprobs, *result.prompt_logprobs)
            found[result.sequence_id] = msgspec.structs.replace(result, prompt_logprobs=scores)
    return list(found.values())
