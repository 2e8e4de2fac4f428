"""An engine that plays a script: the simulated one, whose tokens are those of a reply that was written down.

Tokenizer, template, parsers, scheduler and streams are the real ones. A process is such an engine when
AGENTS_SCRIPT names a script and `inject` stands on PYTHONPATH. A reply is a function of the prompt alone, so
that a choice that continues on another engine goes on with the same tokens.
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
from engine.service import convert
from engine.types import NewSequence

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


@dataclass(slots=True)
class ScriptedSequence(simulated.SimulatedSequence):
    """A sequence and the ids that it will have."""

    reply: tuple[int, ...] = ()


class ScriptedRunner(simulated.SimulatedRunner):
    """The runner of the simulated engine, with replies of a script."""

    def __init__(self, config: Any, script: Script, tokenizer: Tokenizer, end_id: int) -> None:
        super().__init__(config)
        self._script, self._tokenizer, self._end_id = script, tokenizer, end_id

    def token(self, state: simulated.SimulatedSequence, position: int) -> int:
        """The reply's, then the end."""
        assert isinstance(state, ScriptedSequence)
        return state.reply[position] if position < len(state.reply) else self._end_id

    def _new_state(self, new: NewSequence) -> ScriptedSequence:
        plain = super()._new_state(new)
        said = self._script.reply(self._tokenizer.decode(list(plain.prompt), skip_special_tokens=False))
        reply = tuple(self._tokenizer.encode(said, add_special_tokens=False).ids)
        fields = {name: getattr(plain, name) for name in simulated.SimulatedSequence.__slots__}
        return ScriptedSequence(**fields, reply=reply)


def install() -> None:
    """Makes the simulated engine of this process a scripted one, which ignores grammars."""
    script = msgspec.json.decode(Path(os.environ["AGENTS_SCRIPT"]).read_bytes(), type=Script)
    build = simulated.build

    @functools.wraps(build)
    def scripted(config: Any, model: Any, *progress: Any) -> Any:
        runner, memory, facts = build(config, model, *progress)
        tokenizer = Tokenizer.from_file(str(Path(model.path, "tokenizer.json")))
        end_id = msgspec.json.decode(Path(model.path, "config.json").read_bytes())["eos_token_id"]
        made = ScriptedRunner(runner._config, script, tokenizer, end_id)
        return made, memory, msgspec.structs.replace(facts, eos_token_ids=(end_id,))

    simulated.build = scripted
    to_request = convert.to_request

    def without_grammar(submit: Any, *arguments: Any, **options: Any) -> Any:
        submit.ClearField("grammar")
        return to_request(submit, *arguments, **options)

    convert.to_request = without_grammar
