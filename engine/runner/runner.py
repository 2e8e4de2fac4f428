"""Executes plans: applies each, has an executor compute it, and says what came of it. See DESIGN.md.

Plans run strictly one after another; a plan that schedules the token which its predecessor samples finds it
in the sequence table, or on the device. What goes wrong with one sequence (non-finite logits, a broken
grammar, an id outside the vocabulary) is that sequence's `failure`; an exception is a step that failed as a
whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import msgspec

from engine.adapters.store import AdapterStore
from engine.runner.base import RunnerBroken
from engine.runner.executors.executor import Executor, StepTooLargeError
from engine.runner.halving import halves, joined
from engine.runner.inputs import StepInputs, no_masks
from engine.runner.kv_storage import KvStorage
from engine.runner.outcomes import Sampled, conclude
from engine.runner.pooling import Pooler
from engine.runner.prefix_disk.blocks import BlockBytes
from engine.runner.ranks.balance import ExpertBalance
from engine.runner.sequence_table import SequenceTable
from engine.runner.speculation.economics import StepCost
from engine.runner.speculation.proposer import Proposer
from engine.sampling.grammar import GrammarEngine, GrammarMasks
from engine.types import GrammarSpec, ScheduledSequence, SchedulerOutput, SequenceResult, StepResult
from engine.types.experts import ExpertSpread


class LaunchedStep:
    """A step on its way; see PendingStep."""

    __slots__ = (
        "_finish",
        "error",
        "known",
        "num_halvings",
        "result",
        "running",
        "sampled",
        "started_s",
        "step_id",
    )

    def __init__(self, step_id: int, finish: Callable[[LaunchedStep], StepResult]) -> None:
        self.step_id = step_id
        self._finish = finish
        self.started_s = 0.0
        # Where it runs in a thread.
        self.running: Future[None] | None = None
        # Results that were known before anything was computed.
        self.known: Sequence[SequenceResult] = ()
        self.num_halvings = 0
        self.sampled: Sampled | None = None
        self.result: StepResult | None = None
        self.error: Exception | None = None

    def wait(self) -> StepResult:
        """Blocks until the step is done; raises what made it fail as a whole."""
        if self.running is not None:
            self.running.result()
        return self._finish(self)


class ModelRunner:
    """A model, its cache and the state of its sequences. `launch` from one thread, which also waits."""

    def __init__(
        self,
        *,
        executor: Executor,
        table: SequenceTable,
        storage: KvStorage,
        grammar: GrammarEngine,
        proposer: Proposer,
        thread: ThreadPoolExecutor | None = None,
    ) -> None:
        """`thread`: where steps run while the loop plans the next one. Where nobody plans meanwhile, it would
        only cost the way to it and back.
        """
        self.executor = executor
        self.model = executor.model
        self.table = table
        self.storage = storage
        self.grammar = grammar
        if self.model.spec.pooling is not None:
            table.pool = Pooler(self.model.record).take
        self.proposer = proposer
        self._speculates = proposer.config.method != "off"
        # Where the model has slots, who builds the runner says so.
        self.adapters = AdapterStore.of_none()
        # What has experts change ranks, where they lie on several, likewise.
        self.expert_balance: ExpertBalance | None = None
        self._thread = thread
        self._finished_s = 0.0
        # A step that is still on the device.
        self._outstanding: LaunchedStep | None = None

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        """See Runner."""
        step = LaunchedStep(plan.step_id, self._finish)
        if self._thread is None:
            self._begin(plan, step)
        else:
            step.running = self._thread.submit(self._begin, plan, step)
        return step

    def is_ready(self, grammar: GrammarSpec, tenant: str) -> bool:
        """See Runner."""
        return self.grammar.is_ready(grammar, tenant)

    def num_states(self) -> int:
        """Live sequences."""
        return len(self.table.states)

    def num_prefaulted_blocks(self) -> int:
        """See Runner."""
        return self.storage.num_prefaulted_blocks

    def expert_spread(self) -> ExpertSpread | None:
        """See Runner."""
        return None if self.expert_balance is None else self.expert_balance.spread

    def block_bytes(self) -> Callable[[], BlockBytes]:
        """See Runner."""
        return self.storage.block_bytes

    def close(self) -> None:
        """Ends the threads; the memory goes with the object."""
        if self._thread is not None:
            self._thread.shutdown()
        self.adapters.close()
        self.storage.close()
        self.grammar.close()

    def _begin(self, plan: SchedulerOutput, step: LaunchedStep) -> None:
        """Does what can be done of a step without waiting for the device."""
        step.started_s = time.monotonic()
        try:
            with self.executor.mode():
                self._run(plan, step)
        except Exception as error:
            self.executor.raise_if_broken(error)
            cause = error.__cause__ if isinstance(error, StepTooLargeError) else None
            step.error = cause if isinstance(cause, Exception) else error

    def _run(self, plan: SchedulerOutput, step: LaunchedStep) -> None:
        """Apply, inputs, execute; and conclude, unless that has to wait."""
        executor = self.executor
        executor.model.wake()
        if plan.forks:
            # A child starts with its parent's tokens.
            self._settle()
        self._apply(plan)
        if self.expert_balance is not None:
            self.expert_balance.before_step()
        inputs = executor.following(plan.scheduled)
        if inputs is not None:
            self._conclude(step, executor.execute(inputs))
            return
        sound, step.known = self._sorted_out(plan.scheduled)
        if not sound:
            self._book(step, (), 0.0)
            return
        self._hold_thoughts(sound)
        ahead = executor.runs_ahead(sound)
        if not ahead:
            self._settle()
        sampled = None
        # States have moved on by then: such a step fails, and its sequences begin anew in smaller ones.
        # So have newest keys that are whole.
        moves_on = self.model.spec.state is not None or self.storage.keeps_newest_keys
        tries_again = () if moves_on else (StepTooLargeError,)
        # The error is dropped before the next attempt, because its traceback keeps tensors alive.
        with suppress(*tries_again):
            sampled = self._compute(sound, ahead=ahead)
        if sampled is None:
            # More is free once the device has nothing else to do.
            self._settle()
            self._book(step, self._in_parts(step, sound), 0.0)
        elif sampled.arrival is None:
            self._conclude(step, sampled)
        else:
            step.sampled = sampled
            self._outstanding = step

    def _apply(self, plan: SchedulerOutput) -> None:
        """Everything that a plan says before its forward, in the order that base.py defines."""
        table = self.table
        if plan.released or plan.new_sequences or plan.forks:
            self.executor.forget()
        for sequence_id in plan.released:
            state = table.states.get(sequence_id)
            if state is not None and self._speculates:
                self.proposer.ended(state, table)
            table.release(sequence_id)
        forked = {child for _, child in plan.forks}
        for new in plan.new_sequences:
            table.add(new, forked=new.sequence_id in forked)
        for parent, child in plan.forks:
            table.fork(parent, child)
        self.storage.apply(plan)
        for sequence in plan.scheduled:
            if not sequence.new_block_ids and not sequence.num_given_up:
                continue
            slot = table.states[sequence.sequence_id].slot
            table.add_blocks(slot, sequence.new_block_ids)
            if sequence.num_given_up:
                self.executor.forget()
                table.blocks[slot, : sequence.num_given_up] = self.storage.num_blocks

    def _sorted_out(
        self, scheduled: Iterable[ScheduledSequence]
    ) -> tuple[list[ScheduledSequence], list[SequenceResult]]:
        """Those that can be computed, and the results of those that failed before."""
        sound: list[ScheduledSequence] = []
        failed: list[SequenceResult] = []
        for sequence in scheduled:
            failure = self.table.states[sequence.sequence_id].failure
            if failure:
                failed.append(SequenceResult(sequence.sequence_id, (), failure=failure))
            else:
                sound.append(sequence)
        return sound, failed

    def _hold_thoughts(self, sound: Sequence[ScheduledSequence]) -> None:
        """Puts the thoughts that near their budget under masks, from tokens that are all here."""
        if not self.table.thinking:
            return
        in_flight = self._in_flight()
        drafts = {each.sequence_id: len(each.draft_token_ids) for each in sound}
        reached = self.table.hold_thoughts(
            lambda sequence_id: 1 + drafts.get(sequence_id, 0) + in_flight.get(sequence_id, 0)
        )
        if reached:
            self._settle()
        for state in reached:
            self.table.hold(state)

    def _compute(self, sound: list[ScheduledSequence], *, ahead: bool) -> Sampled:
        inputs = self.executor.prepare(sound, ahead=ahead)
        inputs.masks = self._masks(inputs)
        return self.executor.execute(inputs)

    def _in_parts(self, step: LaunchedStep, sound: list[ScheduledSequence]) -> list[SequenceResult]:
        """Results of a step that is concluded at once, in halves where memory ends on the way."""
        parts = halves(sound)
        try:
            return self._results(self._compute(sound, ahead=False))
        except StepTooLargeError as error:
            if parts is None:
                raise (error.__cause__ or error) from None
        step.num_halvings += 1
        first, second = parts
        return joined(self._in_parts(step, first), self._in_parts(step, second))

    def _masks(self, inputs: StepInputs) -> Callable[[], GrammarMasks | None]:
        """Fills masks beside the forward; or after it, where they depend on tokens that the host has not
        read.
        """
        guided = [
            (member, state.matcher, sequence.draft_token_ids)
            for member, (sequence, state) in enumerate(zip(inputs.scheduled, inputs.states, strict=True))
            if sequence.samples and state.matcher is not None
        ]
        inputs.guided = frozenset(member for member, _, _ in guided)
        wanted = [(matcher, drafts) for _, matcher, drafts in guided]
        if not wanted:
            return no_masks
        if self._outstanding is None:
            return self.grammar.fill(wanted).result

        def settled() -> GrammarMasks:
            self._settle()
            return self.grammar.fill(wanted).result()

        return settled

    def _settle(self) -> None:
        """Lets the outstanding step finish and takes its tokens in. What made it fail is its own affair."""
        outstanding = self._outstanding
        if outstanding is None:
            return
        try:
            self._finish(outstanding)
        except RunnerBroken:
            raise
        except Exception as error:
            outstanding.error = error

    def _finish(self, step: LaunchedStep) -> StepResult:
        """The step's result, once the device has come so far."""
        if step.error is not None:
            raise step.error
        if step.result is None:
            if self._outstanding is step:
                self._outstanding = None
            assert step.sampled is not None, "launched"
            try:
                with self.executor.mode():
                    self._conclude(step, step.sampled)
            except Exception as error:
                self.executor.raise_if_broken(error)
                raise
        assert step.result is not None, "concluded"
        return step.result

    def _conclude(self, step: LaunchedStep, sampled: Sampled) -> None:
        self._book(step, self._results(sampled), sampled.forwarded_s)

    def _book(self, step: LaunchedStep, results: Sequence[SequenceResult], forwarded_s: float) -> None:
        now = time.monotonic()
        # While the step before it ran, a device had not begun.
        began_s = max(step.started_s, self._finished_s)
        self._finished_s = now
        saved_s, spent_s = self.proposer.economics.drain() if self._speculates else (0.0, 0.0)
        step.result = StepResult(
            step.step_id,
            (*step.known, *results) if step.known else tuple(results),
            compute_s=now - began_s,
            sampling_s=now - forwarded_s if forwarded_s else 0.0,
            num_halvings=step.num_halvings,
            saved_s=saved_s,
            spent_s=spent_s,
        )

    def _results(self, sampled: Sampled) -> list[SequenceResult]:
        """What a step means for its sequences, with drafts for those that go on."""
        if sampled.arrival is not None:
            sampled.arrival.wait()
        outcomes = conclude(sampled, self.table)
        drafts = self._drafts(sampled, outcomes)
        scores, lost = sampled.scores, sampled.lost
        if scores or drafts or lost:
            members = zip(sampled.rows.members, outcomes, strict=True)
            outcomes = [
                msgspec.structs.replace(
                    outcome,
                    prompt_logprobs=scores.get(member, ()),
                    lost=lost.get(member, ()),
                    next_draft_token_ids=found,
                    next_drafter=self.proposer.drafter_of(sampled.inputs.states[member]) if found else "",
                )
                for member, outcome in members
                for found in [drafts.get(outcome.sequence_id, ())]
            ]
        scheduled = sampled.inputs.scheduled
        scored = [
            SequenceResult(
                scheduled[index].sequence_id,
                (),
                prompt_logprobs=scores.get(index, ()),
                lost=lost.get(index, ()),
            )
            for index in sorted({*scores, *lost})
            if not scheduled[index].samples
        ]
        if sampled.pooled:
            return sampled.pooled
        return scored + outcomes if scored else outcomes

    def _drafts(self, sampled: Sampled, outcomes: list[SequenceResult]) -> dict[int, tuple[int, ...]]:
        """Drafts for the next step of the sequences that go on. Most steps of a method that does not pay are
        those in which nobody is asked: they take no longer than without it.
        """
        proposer, rows, inputs = self.proposer, sampled.rows, sampled.inputs
        count, economics = len(inputs.ids), proposer.economics
        if not self._speculates or economics.passes(count):
            return self._propose(sampled, outcomes, None)
        now = time.monotonic()
        # While the step before it ran, a device had not begun.
        seconds = now - max(sampled.began_s, self._finished_s)
        has_drafts = inputs.branches is not None or not rows.one_each
        is_plain = not has_drafts and int(inputs.query_starts[-1]) == count == rows.tokens.size
        rests = economics.rests(count, seconds, is_plain=is_plain, has_drafts=has_drafts)
        if rests and not economics.is_waking:
            return self._propose(sampled, outcomes, None)
        proposer.saw(inputs, self.table)
        found = self._propose(sampled, outcomes, None if rests else seconds)
        economics.took(time.monotonic() - now)
        return found

    def _propose(
        self, sampled: Sampled, outcomes: list[SequenceResult], seconds: float | None
    ) -> dict[int, tuple[int, ...]]:
        """See _drafts; `seconds` that the step took, None where nothing but forced tokens is asked for."""
        inputs = sampled.inputs
        if seconds is None and (sampled.sound or all(state.matcher is None for state in inputs.states)):
            return {}
        alive = []
        for member, outcome in zip(sampled.rows.members, outcomes, strict=True):
            state = inputs.states[member]
            if not outcome.failure and not outcome.grammar_finished:
                self.proposer.judge(
                    state,
                    outcome.num_drafted,
                    outcome.num_accepted,
                    has_branches=inputs.branches is not None and member in inputs.branches.members,
                )
                alive.append((outcome.sequence_id, state))
        if not alive:
            return {}
        in_flight = self._in_flight()
        found = self.proposer.propose(
            [state for _, state in alive],
            self.table,
            None if seconds is None else _cost(sampled, outcomes, seconds),
            num_in_flight=[in_flight.get(sequence_id, 0) for sequence_id, _ in alive],
        )
        if any(state.draft.branches for _, state in alive):
            # Such a step is put together as a whole.
            self.executor.forget()
        return {sequence_id: drafts for (sequence_id, _), drafts in zip(alive, found, strict=True)}

    def _in_flight(self) -> dict[int, int]:
        """Tokens that the outstanding step draws for each sequence, if it confirms all drafts."""
        step = self._outstanding
        if step is None or step.sampled is None:
            return {}
        scheduled = step.sampled.inputs.scheduled
        return {each.sequence_id: 1 + len(each.draft_token_ids) for each in scheduled if each.samples}


def _cost(sampled: Sampled, outcomes: list[SequenceResult], seconds: float) -> StepCost:
    """What a step took, as those see it who decide about drafts."""
    scheduled = sampled.inputs.scheduled
    drafts, branches = [len(each.draft_token_ids) for each in scheduled], sampled.inputs.branches
    return StepCost(
        seconds=seconds,
        num_sequences=len(drafts),
        num_drafts=sum(drafts) + (0 if branches is None else branches.num_rows),
        num_accepted=sum(outcome.num_accepted for outcome in outcomes),
        decodes_only=all(
            each.samples and each.num_tokens == 1 + count
            for each, count in zip(scheduled, drafts, strict=True)
        ),
    )
