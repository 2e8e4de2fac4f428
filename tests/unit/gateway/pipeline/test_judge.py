"""Complete answers get a verdict on their whole text, choice by choice; cut ones get none."""

from __future__ import annotations

from contract.errors import MillraceError, Reason
from contract.grammar import Verdict
from contract.outputs import FinishReason
from gateway.pipeline.delta import ChoiceDelta, by_choice
from gateway.pipeline.judge import OutputJudge
from gateway.text.delta import TextPart


async def test_the_whole_text_of_each_choice_is_judged() -> None:
    seen: list[str] = []

    async def decide(text: str) -> Verdict:
        seen.append(text)
        return Verdict(text == "[1]", "uniqueItems")

    judge = OutputJudge(decide)
    first = [ChoiceDelta([TextPart("[")], index=0), ChoiceDelta([TextPart("[1,")], index=1)]
    await judge.see(first)
    assert (seen, judge.all_valid) == ([], True)
    good = ChoiceDelta([TextPart("1]")], index=0, finish_reason=FinishReason.STOP)
    await judge.see([good])
    assert (good.verdict, judge.all_valid) == (Verdict(True, "uniqueItems"), True)
    bad = ChoiceDelta([TextPart("1]")], index=1, finish_reason=FinishReason.STOP)
    await judge.see([bad])
    assert seen == ["[1]", "[1,1]"]
    assert (bad.verdict, judge.all_valid) == (Verdict(False, "uniqueItems"), False)
    # Faces that join deltas keep the verdict, which comes last.
    assert by_choice([ChoiceDelta([TextPart("[1,")], index=1), bad])[0].verdict == bad.verdict


async def test_what_is_cut_or_cannot_be_judged_has_no_verdict() -> None:
    async def decide(text: str) -> Verdict:
        raise MillraceError(Reason.GRAMMAR_REFUSED, "takes too long")

    judge = OutputJudge(decide)
    cut = ChoiceDelta([TextPart("[1")], index=0, finish_reason=FinishReason.LENGTH)
    whole = ChoiceDelta([TextPart("[1]")], index=1, finish_reason=FinishReason.STOP)
    await judge.see([cut, whole])
    assert (cut.verdict, whole.verdict, judge.all_valid) == (None, None, True)
