"""The simulated engine keeps budgets of thoughts as the others do, from wherever it takes them up."""

from __future__ import annotations

from contract.thinking import ThinkingTags
from engine.config import SimulatedConfig
from engine.runner.simulated import SimulatedRunner
from engine.types import KeptBlocks, NewSequence, SamplingParams, ScheduledSequence, SchedulerOutput

TAGS = ThinkingTags(open_id=None, close_id=5, opened=True, line_breaks=(6,), blank_line=(6, 6))
PROMPT = (40, 41, 6)


def generated(known: tuple[int, ...], length: int, num_left: int = 0) -> list[int]:
    """The output after what another engine has computed, of which tokens are left behind the first block."""
    runner, output = SimulatedRunner(SimulatedConfig()), list(known)
    ids = (*PROMPT, *known)
    new = NewSequence(
        sequence_id=1,
        token_ids=(*ids[:2], *ids[2 + num_left :]),
        num_prompt_tokens=len(PROMPT) - num_left,
        sampling=SamplingParams(max_thinking_tokens=6, max_tokens=40),
        choice_index=0,
        grammar=None,
        adapter="",
        block_ids=(),
        thinking=TAGS,
        kept=KeptBlocks(num_sinks=1, num_recent=2, start=6, block_size=2),
        left_token_ids=ids[2 : 2 + num_left],
    )
    while len(output) < length:
        at = len(PROMPT) + len(output) - 1 - num_left
        row = ScheduledSequence(1, at, 1, (), True, ())
        news = (new,) if len(output) == len(known) else ()
        (result,) = runner.launch(SchedulerOutput(len(output), news, (row,), ())).wait().results
        output += result.token_ids
    return output


def test_a_thought_ends_in_time_and_goes_on_anywhere() -> None:
    whole = generated((), 14)
    assert whole.index(5) == 5
    assert whole[4:8] == [6, 5, 6, 6]
    assert not {5, 6} & set(whole[8:])
    for cut in range(1, 12):
        assert generated(tuple(whole[:cut]), 14) == whole
        assert generated(tuple(whole[:cut]), 14, num_left=cut) == whole
