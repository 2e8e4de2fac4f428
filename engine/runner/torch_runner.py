"""Executes plans with the native kernels or torch, in a thread of its own where launching may not block the
core loop.

Plans run strictly one after another; a plan that schedules the token which its predecessor samples finds it
in the sequence table. What goes wrong with one sequence (non-finite logits, a broken grammar, an id outside
the vocabulary) is that sequence's `failure`; an exception is a step that failed as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from engine.config import EngineConfig, num_threads
from engine.kernels.host import HOST, Device
from engine.kernels.native import NativeLibrary
from engine.model.checkpoint import folder_of, resolve_checkpoint
from engine.model.device import choose_device
from engine.model.loader import load_here
from engine.model.loading import Load, Model, load_model, native_library
from engine.model.lowering import NativeDecoder
from engine.model.plan import PlanInput, make_plan, num_scratch_blocks, plan_input
from engine.runner.base import PendingStep, Runner
from engine.runner.inputs import StepInputs, prepare_inputs
from engine.runner.kv_storage import KvStorage
from engine.runner.native_decode import NativeDecode
from engine.runner.outcomes import SampledStep, conclude, logprob_reports, with_reports
from engine.runner.prompt_scores import prompt_logprobs
from engine.runner.sequence_table import SequenceTable
from engine.runner.speculation.draft_model import DraftModel
from engine.runner.speculation.economics import StepCost
from engine.runner.speculation.proposer import Proposer
from engine.runner.steady import LastStep, SteadyDecode
from engine.runner.verification import LogitRows, logit_rows, sampling_rows
from engine.sampling.grammar import GrammarEngine, GrammarMasks
from engine.sampling.native import NativeDraws, sampling_library
from engine.sampling.sampler import sample
from engine.types import (
    GrammarSpec,
    MemoryPlan,
    ModelFacts,
    ScheduledSequence,
    SchedulerOutput,
    SequenceResult,
    StepResult,
    TokenLogprobs,
)
from services.config import ModelConfig
from services.memory import keep_freed_memory, one_heap

if TYPE_CHECKING:
    from engine.kernels.attention import AttentionBackend
    from engine.model.decoder import Decoder
    from engine.model.spec import ModelSpec

Progress = Callable[[str, float], None]

# The cache's memory is had from the system for so many full steps ahead of its use.
_AHEAD_STEPS = 2


class PendingTorchStep:
    """A step in the runner's thread."""

    def __init__(self, future: Future[StepResult]) -> None:
        self._future = future

    def wait(self) -> StepResult:
        """Blocks until the step is done; raises what made it fail as a whole."""
        return self._future.result()


class _Done:
    """A step that ran when it was launched; a Future's lock would be for nobody."""

    def __init__(self, result: StepResult | None, error: Exception | None) -> None:
        self._result = result
        self._error = error

    def wait(self) -> StepResult:
        """The result; raises what made the step fail as a whole."""
        if self._result is None:
            assert self._error is not None, "neither result nor error"
            raise self._error
        return self._result


class TorchRunner:
    """A model, its cache and the state of its sequences. `launch` from one thread; see Runner. The attention
    is that of a decoder of torch; a native program has its own.
    """

    def __init__(
        self,
        *,
        model: Model,
        attention: AttentionBackend | None,
        storage: KvStorage,
        grammar: GrammarEngine,
        proposer: Proposer,
        num_threads: int,
        overlaps: bool = True,
        native_sampling: bool = True,
    ) -> None:
        self.model = model
        self.attention = attention
        self.storage = storage
        # A torch.device or HOST.
        self.device: Any = model.device
        self.grammar = grammar
        self.proposer = proposer
        self._began_s = 0.0
        self.table = self._make_table()
        self._steady = SteadyDecode(self.table, storage.block_size)
        self.table.sampling.native = native_sampling
        if not isinstance(model, NativeDecoder):
            import torch

            self.table.sampling.backend = cast("Decoder", model).kernels.names["sampling"]
            self._execute = torch.inference_mode()(self._execute)  # type: ignore[method-assign]
        self._decode = self._native_decode() if native_sampling else None
        # Where nobody plans while a step runs, a second thread would only cost the way to it and back.
        self._thread: ThreadPoolExecutor | None = None
        if overlaps:
            self._thread = ThreadPoolExecutor(
                max_workers=1,
                thread_name_prefix="runner",
                initializer=_no_threads if isinstance(model, NativeDecoder) else _set_threads,
                initargs=(num_threads,),
            )

    def _make_table(self) -> SequenceTable:
        return SequenceTable(
            vocab_size=self.model.spec.vocab_size,
            max_model_len=self.model.max_model_len,
            device=self.device,
            grammar=self.grammar,
        )

    def _native_decode(self) -> NativeDecode | None:
        model = self.model
        if not isinstance(model, NativeDecoder) or model.library is not sampling_library():
            return None
        self.table.sampling.draws = draws = NativeDraws(model.library)
        return NativeDecode(model, self.table, draws, block_size=self.storage.block_size)

    def launch(self, plan: SchedulerOutput) -> PendingStep:
        """Queues a plan, or executes it at once when steps do not overlap."""
        if self._thread is not None:
            self.storage.announce(plan)
            return PendingTorchStep(self._thread.submit(self._execute, plan))
        try:
            return _Done(self._execute(plan), None)
        except Exception as error:
            return _Done(None, error)

    def is_ready(self, grammar: GrammarSpec, tenant: str) -> bool:
        """See Runner."""
        return self.grammar.is_ready(grammar, tenant)

    def num_states(self) -> int:
        """Live sequences."""
        return len(self.table.states)

    def num_prefaulted_blocks(self) -> int:
        """See Runner."""
        return self.storage.num_prefaulted_blocks

    def close(self) -> None:
        """Ends the threads; the memory goes with the object."""
        if self._thread is not None:
            self._thread.shutdown()
        self.storage.close()
        self.grammar.close()

    def _execute(self, plan: SchedulerOutput) -> StepResult:
        started = time.monotonic()
        self.model.wake()
        if self._decode is None or _changes(plan):
            return self._execute_whole(plan, started)
        self._apply(plan)
        results = self._go_on(self._decode, plan.scheduled)
        if results is None:
            return self._execute_rows(plan, started)
        return StepResult(plan.step_id, results, time.monotonic() - started)

    def _execute_whole(self, plan: SchedulerOutput, started: float) -> StepResult:
        self._apply(plan)
        return self._execute_rows(plan, started)

    def _execute_rows(self, plan: SchedulerOutput, started: float) -> StepResult:
        """The forward and sampling of a plan that was applied."""
        sound, failed = self._sorted_out(plan.scheduled)
        results, sampling_s = self._compute(sound) if sound else ([], 0.0)
        return StepResult(
            plan.step_id,
            (*failed, *results),
            compute_s=time.monotonic() - started,
            sampling_s=sampling_s,
        )

    def _go_on(
        self, decode: NativeDecode, scheduled: tuple[ScheduledSequence, ...]
    ) -> tuple[SequenceResult, ...] | None:
        """Results of a step that follows the last one, computed in one native call; None for another one."""
        last = self._steady.follows(scheduled)
        if last is None:
            return None
        self._began_s = time.monotonic()
        appended = decode.run(last)
        if appended is None:
            return None
        if appended and not self.table.sampling.needs_tokens and self.proposer.config.method == "off":
            return tuple(map(_token_of, last.ids, decode.tokens()))
        return self._conclude_decode(decode, last, appended)

    def _conclude_decode(
        self, decode: NativeDecode, last: LastStep, appended: bool
    ) -> tuple[SequenceResult, ...]:
        """Results of a native step whose draws are reported, counted, followed by drafts, or failed."""
        logits, drawn = decode.drawn()
        if not appended:
            self._steady.forget()
        step = SampledStep(inputs=last.inputs, rows=last.rows, logits=logits, drawn=drawn, masks=None)
        return tuple(self._conclude(step, {}, appended=appended))

    def _sorted_out(
        self, scheduled: Sequence[ScheduledSequence]
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

    def _compute(self, sound: list[ScheduledSequence]) -> tuple[list[SequenceResult], float]:
        """Results of sequences that can be computed, and how much of the time sampling took, in seconds."""
        steady = self._steady.following(sound)
        if steady is not None:
            inputs, rows = steady
            self._began_s = time.monotonic()
            hidden = self.model.forward(inputs.batch, self.storage.layers, self.attention)
            forwarded = time.monotonic()
            return self._sample(inputs, rows, hidden, None, {}), time.monotonic() - forwarded
        inputs = prepare_inputs(
            sound,
            self.table,
            block_size=self.storage.block_size,
            spare_slot=self.storage.spare_slot,
            device=self.device,
            row_multiple=self.model.row_multiple,
        )
        pending_masks = self._start_masks(inputs)
        self._began_s = time.monotonic()
        hidden = self.model.forward(inputs.batch, self.storage.layers, self.attention)
        forwarded = time.monotonic()
        rows = logit_rows(inputs, self.table)
        scores = prompt_logprobs(inputs, hidden, self.model, self.table)
        results = self._sample(
            inputs, rows, hidden, pending_masks.result() if pending_masks else None, scores
        )
        self._steady.keep(inputs, rows)
        return results, time.monotonic() - forwarded

    def _apply(self, plan: SchedulerOutput) -> None:
        """Everything that a plan says before its forward, in the order that base.py defines."""
        if plan.released or plan.new_sequences or plan.forks:
            self._steady.forget()
        for sequence_id in plan.released:
            self.table.release(sequence_id)
        forked = {child for _, child in plan.forks}
        for new in plan.new_sequences:
            self.table.add(new, forked=new.sequence_id in forked)
        for parent, child in plan.forks:
            self.table.fork(parent, child)
        self.storage.apply(plan)
        for sequence in plan.scheduled:
            if not sequence.new_block_ids and not sequence.num_given_up:
                continue
            slot = self.table.states[sequence.sequence_id].slot
            self.table.add_blocks(slot, sequence.new_block_ids)
            if sequence.num_given_up:
                self._steady.forget()
                self.table.blocks[slot, : sequence.num_given_up] = self.storage.num_blocks

    def _start_masks(self, inputs: StepInputs) -> Future[GrammarMasks] | None:
        wanted = [
            (state.matcher, sequence.draft_token_ids)
            for sequence, state in zip(inputs.scheduled, inputs.states, strict=True)
            if sequence.samples and state.matcher is not None
        ]
        return self.grammar.fill(wanted) if wanted else None

    def _sample(
        self,
        inputs: StepInputs,
        rows: LogitRows,
        hidden: Any,
        masks: GrammarMasks | None,
        scores: dict[int, tuple[TokenLogprobs, ...]],
    ) -> list[SequenceResult]:
        """Draws, moves grammars along, appends tokens, reports."""
        results = [
            SequenceResult(inputs.scheduled[index].sequence_id, (), prompt_logprobs=found)
            for index, found in scores.items()
            if not inputs.scheduled[index].samples
        ]
        if not rows.members:
            return results
        logits = self.model.logits_of(hidden, rows.tokens)
        drawn = sample(logits, self.table.sampling, sampling_rows(inputs, rows, masks))
        step = SampledStep(inputs=inputs, rows=rows, logits=logits, drawn=drawn, masks=masks)
        return results + self._conclude(step, scores)

    def _conclude(
        self,
        step: SampledStep,
        scores: dict[int, tuple[TokenLogprobs, ...]],
        *,
        appended: bool = False,
    ) -> list[SequenceResult]:
        """Results of the sequences that drew; their tokens may have been `appended` to the table."""
        rows = step.rows
        outcomes = conclude(step)
        reports = logprob_reports(step, outcomes, self.table)
        if appended:
            self.table.sampling.append(rows.slots, step.drawn.tokens)
        else:
            self._append(step, outcomes)
        proposals = self._propose(step.inputs, rows, outcomes)
        return [
            with_reports(
                outcome,
                logprobs=report,
                prompt_logprobs=scores.get(member, ()),
                drafts=proposals.get(outcome.sequence_id, ()),
            )
            for member, outcome, report in zip(rows.members, outcomes, reports, strict=True)
        ]

    def _propose(
        self, inputs: StepInputs, rows: LogitRows, outcomes: list[SequenceResult]
    ) -> dict[int, tuple[int, ...]]:
        """Drafts for the next step of the sequences that go on."""
        guided = any(state.matcher is not None for state in inputs.states)
        if self.proposer.config.method == "off" and not guided:
            return {}
        alive = []
        for member, outcome in zip(rows.members, outcomes, strict=True):
            state = inputs.states[member]
            if not outcome.failure and not outcome.grammar_finished:
                self.proposer.judge(state, outcome.num_drafted, outcome.num_accepted)
                alive.append((outcome.sequence_id, state))
        if not alive:
            return {}
        drafts = [len(each.draft_token_ids) for each in inputs.scheduled]
        step = StepCost(
            seconds=time.monotonic() - self._began_s,
            num_sequences=len(drafts),
            num_drafts=sum(drafts),
            num_accepted=sum(outcome.num_accepted for outcome in outcomes),
            decodes_only=all(
                each.samples and each.num_tokens == 1 + count
                for each, count in zip(inputs.scheduled, drafts, strict=True)
            ),
        )
        found = self.proposer.propose([state for _, state in alive], self.table, step)
        return {sequence_id: drafts for (sequence_id, _), drafts in zip(alive, found, strict=True)}

    def _append(self, step: SampledStep, outcomes: list[SequenceResult]) -> None:
        """Makes the new tokens part of their sequences."""
        rows, table = step.rows, self.table
        if step.one_row_each and all(outcome.token_ids for outcome in outcomes):
            table.append_one_each(rows.slots, step.drawn.tokens)
            table.sampling.append(rows.slots, step.drawn.tokens)
            return
        slots: list[int] = []
        tokens: list[int] = []
        for member, outcome in zip(rows.members, outcomes, strict=True):
            slot = int(step.inputs.slots[member])
            table.append(slot, outcome.token_ids)
            slots.extend([slot] * len(outcome.token_ids))
            tokens.extend(outcome.token_ids)
        table.sampling.append(np.array(slots, np.int64), np.array(tokens, np.int64))


def build(
    config: EngineConfig, model: ModelConfig, progress: Progress, load: Load = load_here
) -> tuple[Runner, MemoryPlan, ModelFacts]:
    """Plans the memory, loads the checkpoint and allocates the cache. `load` is how weights come here that
    are packed for the native kernels (engine/model/loader).

    `progress` gets a phase and its done part (0 to 1). Raises ConfigError (CheckpointError) with one clear
    line.
    """
    if not config.num_threads:
        config = msgspec.structs.replace(config, num_threads=num_threads())
    device_name, available = choose_device(config)
    given = plan_input(config, model, device=device_name, available_bytes=available)
    plan = make_plan(given)
    spec = given.spec
    one_heap()
    keep_freed_memory()
    folder = resolve_checkpoint(model.path)
    library = native_library(config, spec, device_name)
    if library is None:
        _set_threads(config.num_threads)
    else:
        library.usual_threads = config.num_threads
    attention, device = _attention(given, spec, device_name, library)
    decoder = load_model(
        folder,
        spec,
        dtype=given.dtype,
        device=device_name,
        max_model_len=plan.max_model_len,
        progress=progress,
        config=config,
        library=library,
        load=load,
    )
    if device.type == "cuda":
        from engine.runner.cuda.build import measured_plan

        assert attention is not None
        plan = measured_plan(given, cast("Decoder", decoder), attention)
    progress("allocate KV cache", 0.0)
    storage_options: dict[str, Any] = {
        "block_size": plan.block_size,
        "kv_dtype": given.kv_dtype,
        "device": device,
        "host_blocks": config.cache.host_bytes // (plan.kv_bytes_per_token * plan.block_size),
    }
    ahead_blocks = _AHEAD_STEPS * config.scheduler.max_num_batched_tokens // plan.block_size
    storage = KvStorage(spec, num_blocks=plan.num_blocks, ahead_blocks=ahead_blocks, **storage_options)
    draft = _draft_model(given, plan, storage_options, progress, load)
    progress("allocate KV cache", 1.0)
    parts: dict[str, Any] = {
        "storage": storage,
        "grammar": GrammarEngine(folder_of(folder), spec.vocab_size, spec.eos_token_ids),
        "proposer": Proposer(config.speculation, draft),
        "num_threads": config.num_threads,
        "native_sampling": config.native != "off",
    }
    if device.type == "cuda":
        from engine.runner.cuda.build import make_device_runner

        assert attention is not None
        runner: TorchRunner = make_device_runner(
            config, cast("Decoder", decoder), attention, progress=progress, **parts
        )
    else:
        overlaps = config.scheduler.overlap == "on"
        runner = TorchRunner(model=decoder, attention=attention, overlaps=overlaps, **parts)
    facts = ModelFacts(
        max_model_len=plan.max_model_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        dtype=given.dtype,
        attention_backend="native" if attention is None else attention.name,
        device=str(device),
        num_layers=spec.num_layers,
        # A draft model reads the same tables, as far back as it likes.
        window=spec.window if draft is None else None,
    )
    return runner, plan, facts


def _draft_model(
    given: PlanInput,
    plan: MemoryPlan,
    storage_options: dict[str, Any],
    progress: Progress,
    load: Load,
) -> DraftModel | None:
    """The draft model that the plan counts in, or None."""
    if given.draft is None:
        return None
    spec, num_scratch = given.draft.spec, num_scratch_blocks(given.config)
    device = str(storage_options["device"])
    library = native_library(given.config, spec, device)
    attention, place = _attention(given, spec, device, library)
    decoder = load_model(
        Path(given.draft.folder),
        spec,
        dtype=given.dtype,
        device=device,
        max_model_len=plan.max_model_len + given.config.speculation.num_draft_tokens,
        progress=lambda phase, part: progress("load draft model", part),
        config=msgspec.structs.replace(given.config, quantize="off"),
        library=library,
        load=load,
    )
    # Its contents follow from the tokens, so nothing of it is kept on the host.
    options = {**storage_options, "device": place, "host_blocks": 0}
    return DraftModel(
        decoder,
        attention,
        KvStorage(spec, num_blocks=plan.num_blocks + num_scratch, **options),
        num_scratch_blocks=num_scratch,
    )


def _attention(
    given: PlanInput, spec: ModelSpec, device: str, library: NativeLibrary | None
) -> tuple[AttentionBackend | None, Device]:
    """What computes a model's attention, and where; none where a native program does."""
    if library is not None:
        return None, HOST
    import torch

    from engine.runner.attention_choice import attention_of

    place = torch.device(device)
    return attention_of(given.config, spec, getattr(torch, given.dtype), place), place


def _changes(plan: SchedulerOutput) -> bool:
    """Whether a plan says anything but which tokens are computed, and in which further blocks."""
    return bool(
        plan.new_sequences
        or plan.released
        or plan.forks
        or plan.block_copies
        or plan.offloads
        or plan.restores
    )


def _token_of(sequence_id: int, token: int) -> SequenceResult:
    return SequenceResult(sequence_id, (token,))


def _set_threads(num_threads: int) -> None:
    """Threads of a forward of torch."""
    import torch

    torch.set_num_threads(num_threads)


def _no_threads(num_threads: int) -> None:
    """The native library has a pool of its own."""
