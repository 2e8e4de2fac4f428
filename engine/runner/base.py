"""The border between the core loop and whatever executes a step.

The real runner, the simulated one and test doubles implement the same two protocols. A plan is plain data
(`engine.types.SchedulerOutput`), so none of them sees the scheduler.

Order in which a runner applies one plan:
`released` -> `new_sequences` -> `forks` -> `offloads` (device to host) -> `restores` (host to device) ->
`block_copies` -> `state_offloads` -> `state_copies` -> `state_restores` -> forward and sampling of
`scheduled`.
Offloads come first because the device block may be handed to another sequence in the same plan.
Within `block_copies` no destination is also a source, so the copies may run in any order or as one gather.
Within `state_copies` a destination may be a source, which is read before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.config import EngineConfig
from engine.runner.prefix_disk.blocks import BlockBytes
from engine.types import GrammarSpec, MemoryPlan, ModelFacts, SchedulerOutput, StepResult
from engine.types.experts import ExpertSpread
from runtime.config import ModelConfig

# Told (name of the stage, fraction done in [0, 1]) while a model is loaded.
Progress = Callable[[str, float], None]


class RunnerBroken(Exception):
    """The device or its state is lost for good. No later step can succeed, so nothing is retried."""


class PendingStep(Protocol):
    """A step that was launched and may still be running."""

    def wait(self) -> StepResult:
        """Blocks until the step is done and returns its result; called exactly once.

        A step that failed as a whole either raises or returns a StepResult with `failure` set. Either way
        nothing of it counts: no token was sampled, and the runner's states of sequences are as before the
        launch except for `released`, `new_sequences` and `forks`. Contents of the scheduled slots are
        undefined. The core then releases every sequence of the failed step and submits it anew. What a step
        launched before that computed upon the failed one is ignored, whether it succeeds or fails.
        """


class Adapters(Protocol):
    """The adapters that a runner knows. Asked in one thread; steps may run meanwhile."""

    def add_later(self, token: int, name: str, folder: str) -> None:
        """Begins to make an adapter known; `answers` says what came of it."""

    def answers(self) -> list[tuple[int, str]]:
        """Tokens of additions that are done, each with why it cannot be served, else ""."""

    def drop(self, name: str) -> None:
        """Forgets one that nobody will ask for any more."""

    def begin(self, slot: int, name: str) -> None:
        """Begins to load an adapter into a slot that no step computes with."""

    def finished(self) -> list[tuple[int, str]]:
        """Slots that are loaded since the last call, each with why that failed, else ""."""


class Runner(Protocol):
    """Executes plans in the order in which they are launched.

    One step may be launched while the previous one is still running (overlapped scheduling): the second plan
    then schedules the token that the first one samples, which only the runner will know. Never more than two
    steps are outstanding. `launch` is always called from one thread.
    """

    def launch(self, plan: SchedulerOutput) -> PendingStep:
        """Starts one step without waiting for it. An empty plan (`scheduled == ()`) still applies
        releases and block copies. Raises RunnerBroken when the device is lost.
        """

    def is_ready(self, grammar: GrammarSpec, tenant: str) -> bool:
        """Whether a sequence under this grammar can begin without holding up a step. What that takes is begun
        when it is first asked for; ask again.
        """

    @property
    def adapters(self) -> Adapters:
        """What brings adapters into slots, in which rows of a plan find them."""

    def num_states(self) -> int:
        """Sequences that the runner holds state for (token ids, penalties, grammar matchers)."""

    def num_prefaulted_blocks(self) -> int:
        """Blocks of the cache, from the first on, that hold memory though nobody may have used them yet."""

    def expert_spread(self) -> ExpertSpread | None:
        """How rows are spread over ranks that have some experts each; None where there are none."""

    def block_bytes(self) -> Callable[[], BlockBytes] | None:
        """What makes ways to the bytes of single blocks; None where blocks hold nothing."""

    def close(self) -> None:
        """Frees the device. No step is outstanding; further calls do nothing."""


class Builder(Protocol):
    """Entry point of a runner's module, called once in the core process.

    Returns the runner, loaded, with the memory plan that it really allocated and the facts of the model; its
    first steps are the caller's to take (engine.core.warm_up). Raises runtime.errors.ConfigError for what
    the operator can mend (unknown architecture, missing file, too little memory); its message reaches the
    operator as it is.
    """

    def __call__(
        self, config: EngineConfig, model: ModelConfig, progress: Progress
    ) -> tuple[Runner, MemoryPlan, ModelFacts]: ...
