"""An engine that plays a script: the simulated one, whose tokens are those of a reply that was written down.

Tokenizer, template, grammars, parsers, scheduler and streams are the real ones. A process is such an engine
when AGENTS_SCRIPT names a script and `inject` stands on PYTHONPATH. A reply is a function of the prompt
alone, so that a choice that continues on another engine goes on with the same tokens.

A reply is walked through the request's grammar, token by token, as engines with weights are led by it. One
that the grammar does not admit is not said: its sequence fails. What was walked stands in a file (`walks`).
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from engine.runner import simulated
from engine.sampling.grammar import GrammarEngine
from engine.service import convert
from engine.types import GrammarSpec, NewSequence, ScheduledSequence, SequenceResult

THOUGHT = "I know how.\n</think>\n\n"


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What the model of an agent says: step k once the conversation holds the results of k calls."""

    # Conversations without it are not the task: agents ask for titles and the like.
    marker: str
    steps: list[str]
    final: str
    otherwise: str = "All right."

    def reply(self, prompt: str) -> str:
        """To a prompt as the bundled model's template renders it, which may have opened a thought."""
        thought = THOUGHT if prompt.endswith("<think>\n") else ""
        if self.marker not in prompt:
            return thought + self.otherwise
        done = prompt.count("<tool_response>")
        return thought + (self.steps[done] if done < len(self.steps) else self.final)


class Walk(msgspec.Struct, frozen=True, kw_only=True):
    """A reply that was walked through a grammar; `problem` says where it left it."""

    said: str
    problem: str = ""


def walks(script: Path) -> list[Walk]:
    """What the engines of a script have walked, in the order in which it began."""
    written = _walks(script)
    lines = written.read_bytes().splitlines() if written.exists() else []
    return [msgspec.json.decode(line, type=Walk) for line in lines]


def _walks(script: Path) -> Path:
    return script.with_suffix(".walks")


@dataclass(slots=True)
class ScriptedSequence(simulated.SimulatedSequence):
    """A sequence and the ids that it will have, or why it has none."""

    reply: tuple[int, ...] = ()
    problem: str = ""


class ScriptedRunner(simulated.SimulatedRunner):
    """The runner of the simulated engine, with replies of the script in a file."""

    def __init__(self, config: Any, script: Path, model: Path) -> None:
        super().__init__(config)
        self._script = msgspec.json.decode(script.read_bytes(), type=Script)
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        facts = msgspec.json.decode((model / "config.json").read_bytes())
        self.end_id: int = facts["eos_token_id"]
        self._grammars = GrammarEngine(model, facts["vocab_size"], (self.end_id,))
        self._walks = _walks(script)

    def is_ready(self, grammar: GrammarSpec, tenant: str) -> bool:
        """See Runner."""
        return self._grammars.is_ready(grammar, tenant)

    def close(self) -> None:
        """See Runner."""
        super().close()
        self._grammars.close()

    def token(self, state: simulated.SimulatedSequence, position: int) -> int:
        """The reply's, then the end."""
        assert isinstance(state, ScriptedSequence)
        return state.reply[position] if position < len(state.reply) else self.end_id

    def _new_state(self, new: NewSequence) -> ScriptedSequence:
        plain = super()._new_state(new)
        said = self._script.reply(self._tokenizer.decode(list(plain.prompt), skip_special_tokens=False))
        reply = tuple(self._tokenizer.encode(said, add_special_tokens=False).ids)
        problem = ""
        if new.grammar is not None:
            problem = self._problem(new.grammar, reply)
            line = msgspec.json.encode(Walk(said=said, problem=problem)) + b"\n"
            # One write, because engines share the file.
            with self._walks.open("ab", buffering=0) as file:
                file.write(line)
        fields = {name: getattr(plain, name) for name in simulated.SimulatedSequence.__slots__}
        return ScriptedSequence(**fields, reply=reply, problem=problem)

    def _problem(self, grammar: GrammarSpec, reply: tuple[int, ...]) -> str:
        """Where a reply leaves the grammar; "" if it follows it to its end."""
        matcher = self._grammars.matcher(grammar, ())
        for index, token in enumerate((*reply, self.end_id)):
            if matcher.finished and token == self.end_id:
                break
            if matcher.finished or not matcher.try_accept(token):
                before = self._tokenizer.decode(list(reply[:index]), skip_special_tokens=False)
                refused = self._tokenizer.decode([token], skip_special_tokens=False)
                return f"the grammar does not admit {refused!r} behind {before!r}"
        return ""

    def _compute(self, row: ScheduledSequence) -> SequenceResult:
        state = self._states[row.sequence_id]
        assert isinstance(state, ScriptedSequence)
        if state.problem:
            return SequenceResult(row.sequence_id, (), failure=state.problem)
        return super()._compute(row)


def install() -> None:
    """Makes the simulated engine of this process a scripted one, which takes grammars."""
    script = Path(os.environ["AGENTS_SCRIPT"])
    build = simulated.build

    @functools.wraps(build)
    def scripted(config: Any, model: Any, *progress: Any) -> Any:
        runner, memory, facts = build(config, model, *progress)
        made = ScriptedRunner(runner._config, script, Path(model.path))
        return made, memory, msgspec.structs.replace(facts, eos_token_ids=(made.end_id,))

    simulated.build = scripted
    to_request = convert.to_request

    def with_grammar(submit: Any, context: Any, limits: Any, **options: Any) -> Any:
        return to_request(submit, context, msgspec.structs.replace(limits, simulated=False), **options)

    convert.to_request = with_grammar
