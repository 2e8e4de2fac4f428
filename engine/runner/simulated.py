"""An engine without weights: deterministic tokens at a configurable speed.

The token at output position i (0 for the first) of choice c is

    first_token_id + (sum of the prompt's ids + 13 * seed + 7 * c + i) mod (last_token_id - first_token_id)

so every output can be checked by hand, and a choice that continues after a preemption, or on another engine,
yields the same tokens. If `allowed_token_ids` is given, the same number picks from that list instead.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from checkpoint.files import find
from checkpoint.vocabulary import read_token_ids
from contract.thinking import Thought
from engine.config import EngineConfig, SimulatedConfig
from engine.runner.base import Progress, RunnerBroken
from engine.types import (
    GrammarSpec,
    MemoryPlan,
    ModelFacts,
    NewSequence,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
    SequenceResult,
    StepResult,
    TokenLogprobs,
)
from runtime.config import ModelConfig
from runtime.errors import ConfigError

# Log-probability reported for every token.
_LOGPROB = math.log(0.5)


@dataclass(slots=True)
class SimulatedSequence:
    """What the runner remembers of one sequence."""

    sampling: SamplingParams
    choice_index: int
    prompt: tuple[int, ...]
    prompt_sum: int
    # Prompt and output, the tokens sampled here included.
    num_tokens: int
    is_poisoned: bool
    # With a budget.
    thought: Thought | None = None


class SimulatedStep:
    """A step whose result is known and whose time has perhaps not come."""

    def __init__(self, result: StepResult | None, done_s: float, cause: str) -> None:
        self._result = result
        self._done_s = done_s
        self._cause = cause

    def wait(self) -> StepResult:
        """Sleeps until the step would be done; raises when it was made to fail."""
        delay = self._done_s - time.monotonic()
        if delay > 0:
            time.sleep(delay)
        if self._result is None:
            raise RuntimeError(self._cause)
        return self._result


class NamesAlone:
    """Adapters of an engine without weights: every one can be served, and is there at once."""

    def __init__(self) -> None:
        self._added: list[tuple[int, str]] = []
        self._loaded: list[tuple[int, str]] = []

    def add_later(self, token: int, name: str, folder: str) -> None:
        """See Adapters."""
        self._added.append((token, ""))

    def answers(self) -> list[tuple[int, str]]:
        """See Adapters."""
        found, self._added = self._added, []
        return found

    def drop(self, name: str) -> None:
        """See Adapters."""

    def begin(self, slot: int, name: str) -> None:
        """See Adapters."""
        self._loaded.append((slot, ""))

    def finished(self) -> list[tuple[int, str]]:
        """See Adapters."""
        found, self._loaded = self._loaded, []
        return found


class SimulatedRunner:
    """Implements engine.runner.base.Runner. Steps take their time one after another, as on a device."""

    def __init__(self, config: SimulatedConfig) -> None:
        self._config = config
        self._span = min(config.last_token_id, config.vocab_size) - config.first_token_id
        self._states: dict[int, SimulatedSequence] = {}
        self._free_s = 0.0
        self.adapters = NamesAlone()

    def launch(self, plan: SchedulerOutput) -> SimulatedStep:
        """Applies the plan; the step is done when its simulated time is over."""
        for sequence_id in plan.released:
            self._states.pop(sequence_id, None)
        for new in plan.new_sequences:
            self._states[new.sequence_id] = self._new_state(new)
        for parent, child in plan.forks:
            state = self._states[parent]
            thought = None if state.thought is None else state.thought.copy()
            self._states[child] = replace(state, thought=thought)
        seconds = self._duration(plan)
        self._free_s = max(time.monotonic(), self._free_s) + seconds
        if any(self._states[row.sequence_id].is_poisoned for row in plan.scheduled):
            return SimulatedStep(None, self._free_s, "a prompt holds simulation.poison_token_id")
        results = tuple(self._compute(row) for row in plan.scheduled)
        return SimulatedStep(StepResult(plan.step_id, results, seconds), self._free_s, "")

    def is_ready(self, grammar: GrammarSpec, tenant: str) -> bool:
        """Grammars are refused before they come here."""
        return True

    def num_prefaulted_blocks(self) -> int:
        """No memory is held."""
        return 0

    def expert_spread(self) -> None:
        """No experts lie anywhere."""

    def block_bytes(self) -> None:
        """No block holds anything."""

    def num_states(self) -> int:
        """Sequences that are remembered."""
        return len(self._states)

    def close(self) -> None:
        """Forgets everything."""
        self._states.clear()

    def token(self, state: SimulatedSequence, position: int) -> int:
        """The token at an output position, by the formula at the top of this module."""
        number = state.prompt_sum + 13 * state.sampling.seed + 7 * state.choice_index + position
        allowed = state.sampling.allowed_token_ids
        return (
            allowed[number % len(allowed)] if allowed else self._config.first_token_id + number % self._span
        )

    def _new_state(self, new: NewSequence) -> SimulatedSequence:
        prompt, output = new.text
        if self._config.break_token_id in prompt:
            raise RunnerBroken("a prompt holds simulation.break_token_id")
        poisoned = self._config.poison_token_id in prompt
        thought, budget = None, new.sampling.max_thinking_tokens
        if new.thinking is not None and budget is not None:
            thought = Thought(new.thinking, budget, prompt[-1:])
            thought.read(output)
        return SimulatedSequence(
            new.sampling,
            new.choice_index,
            prompt,
            sum(prompt) + sum(new.adapter.encode()),
            len(prompt) + len(output),
            poisoned,
            thought,
        )

    def _duration(self, plan: SchedulerOutput) -> float:
        if not plan.scheduled:
            return 0.0
        per_token = 1 / self._config.tokens_per_s if self._config.tokens_per_s else 0.0
        return self._config.step_ms / 1000 + plan.num_tokens * per_token

    def _compute(self, row: ScheduledSequence) -> SequenceResult:
        state = self._states[row.sequence_id]
        prompt_logprobs = self._prompt_logprobs(row, state)
        if not row.samples:
            return SequenceResult(row.sequence_id, (), prompt_logprobs=prompt_logprobs)
        first = state.num_tokens - len(state.prompt)
        tokens = [self._drawn(state, first)]
        for draft in row.draft_token_ids:
            if draft != tokens[-1]:
                break
            tokens.append(self._drawn(state, first + len(tokens)))
        state.num_tokens += len(tokens)
        count = state.sampling.logprobs
        logprobs = () if count is None else tuple(self._logprob(token, count) for token in tokens)
        return SequenceResult(
            row.sequence_id,
            tuple(tokens),
            logprobs,
            prompt_logprobs,
            num_drafted=len(row.draft_token_ids),
            num_accepted=len(tokens) - 1,
        )

    def _drawn(self, state: SimulatedSequence, position: int) -> int:
        """The token that is due in a thought, or the formula's."""
        forced = None if state.thought is None else state.thought.forced()
        token = self.token(state, position) if forced is None else forced
        if state.thought is not None and token == state.thought.excluded():
            token += 1
        if state.thought is not None:
            state.thought.read((token,))
        return token

    def _prompt_logprobs(self, row: ScheduledSequence, state: SimulatedSequence) -> tuple[TokenLogprobs, ...]:
        count = state.sampling.prompt_logprobs
        if count is None:
            return ()
        # The logits of position p are about token p + 1.
        ids = state.prompt[row.start + 1 : row.start + row.num_tokens + 1]
        return tuple(self._logprob(token, count) for token in ids)

    def _logprob(self, token_id: int, count: int) -> TokenLogprobs:
        # Alternatives are the ids that follow, or at the vocabulary's end those before.
        step = 1 if token_id + count <= self._config.vocab_size else -1
        return TokenLogprobs(
            token_id,
            _LOGPROB,
            tuple(token_id + step * offset for offset in range(count)),
            tuple(_LOGPROB * (offset + 1) for offset in range(count)),
        )


def _no_progress(stage: str, fraction: float) -> None:
    """Used when nobody watches."""


def build(
    config: EngineConfig, model: ModelConfig, progress: Progress = _no_progress
) -> tuple[SimulatedRunner, MemoryPlan, ModelFacts]:
    """The simulated runner of a configuration; nothing is loaded."""
    simulation, block_size = config.simulation, config.cache.block_size
    progress("simulated engine", 1.0)
    limit = min(simulation.max_model_len, config.max_model_len or simulation.max_model_len)
    memory = MemoryPlan.of_counts(simulation.num_blocks, block_size, limit)
    facts = ModelFacts(
        max_model_len=memory.max_model_len,
        vocab_size=simulation.vocab_size,
        eos_token_ids=(),
        dtype="none",
        attention_backend="simulated",
        device="none",
        num_layers=0,
    )
    return SimulatedRunner(_with_tokens(simulation, model)), memory, facts


def _with_tokens(simulation: SimulatedConfig, model: ModelConfig) -> SimulatedConfig:
    """What draws only ids that have a token, where the model's files are there. Raises ConfigError."""
    if not Path(model.path).exists():
        return simulation
    count = read_token_ids(find(model.path, weights=False)).count
    vocab_size = min(simulation.vocab_size, count or simulation.vocab_size)
    if simulation.first_token_id >= vocab_size:
        raise ConfigError(
            f"engine.simulation.first_token_id = {simulation.first_token_id}: must be below the {count} ids "
            f"of the tokenizer of model.path = {model.path!r}"
        )
    return msgspec.structs.replace(simulation, vocab_size=vocab_size)
