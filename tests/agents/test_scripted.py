"""The engine that plays a script says what the request's grammar admits, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from contract.chat import ToolChoiceMode
from contract.grammar import GrammarSpec
from engine.config import SimulatedConfig
from engine.sampling.grammar import BACKEND
from engine.types import NewSequence, SamplingParams, ScheduledSequence, SchedulerOutput
from services.supervisor.config import BUNDLED_MODEL
from tests.agents.scripted import Script, ScriptedRunner, walks
from tests.unit.tokenizer_svc.test_grammars import Family
from tokenizer_svc.grammar.request import Built, GrammarRequest, ToolRules, ToolSpec

SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["path"],
    "additionalProperties": False,
}


def grammar_of(side: Family) -> GrammarSpec:
    """Of a tool that may be called behind any text."""
    tools = (ToolSpec(name="read", parameters_json=json.dumps(SCHEMA)),)
    built = side.build(
        GrammarRequest(
            tools=ToolRules(tools=tools, mode=ToolChoiceMode.AUTO, parallel=True, format=side.format)
        )
    )
    assert isinstance(built, Built)
    return GrammarSpec(digest="of the test", payload=built.payload, backend=BACKEND)


@pytest.mark.parametrize(
    ("called", "refused"),
    [
        ('{"name": "read", "arguments": {"path": "a } b", "count": 3}}', ""),
        ('{"name": "read", "arguments": {"path": 3}}', '"path": '),
        ('{"name": "write", "arguments": {"path": "a"}}', '{"name": "'),
        ('{"name": "read", "arguments": {}}', '"arguments": {'),
        ('{"name": "read", "arguments": {"path": "a"', '"path": "a'),
    ],
)
def test_a_reply_is_said_as_far_as_its_grammar_admits_it(tmp_path: Path, called: str, refused: str) -> None:
    said = f"Step 1.\n<tool_call>\n{called}\n</tool_call>"
    file = tmp_path / "script.json"
    file.write_bytes(msgspec.json.encode(Script(marker="", steps=[said], final="Done.")))
    side = Family.at(BUNDLED_MODEL)
    runner = ScriptedRunner(SimulatedConfig(), file, BUNDLED_MODEL)
    prompt = tuple(side.tokenizer.encode("Read it.").ids)
    new = NewSequence(
        sequence_id=1,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(max_tokens=400),
        choice_index=0,
        grammar=grammar_of(side),
        adapter="",
        block_ids=(),
    )
    output: list[int] = []
    while runner.end_id not in output:
        row = ScheduledSequence(1, len(prompt) + len(output) - 1, 1, (), True, ())
        plan = SchedulerOutput(len(output), () if output else (new,), (row,))
        (result,) = runner.launch(plan).wait().results
        if result.failure:
            break
        output += result.token_ids
    runner.close()
    (walk,) = walks(file)
    assert (walk.said, walk.problem) == (said, result.failure)
    if refused:
        assert result.failure.startswith("the grammar does not admit")
        assert refused in result.failure
        assert not output
    else:
        assert not result.failure
        assert side.tokenizer.decode(output[:-1], skip_special_tokens=False) == said
