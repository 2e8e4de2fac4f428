"""The runner of GPUs: a step is launched while the one before it runs, and waits for nothing.

What the step before draws is fed on the device (DeviceTable.last_tokens), so the host reads tokens one step
late. Decode steps replay captured graphs where there are some; others run eagerly, and are queued the same
way. A step that needs to know tokens before it is computed (drafts, forks, beams, log-probabilities of
prompts) first lets the outstanding one finish, and is executed as TorchRunner does it. Rows under a grammar
need them only for their masks: those are filled while their forward runs.

Shape letters: S sequences, R rows that sample, E hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.transfer import on_device
from engine.model.decoder import Decoder
from engine.runner.base import PendingStep, RunnerBroken
from engine.runner.cuda.decode_graphs import UNREAD, DecodeGraphs
from engine.runner.cuda.device_table import DeviceTable
from engine.runner.cuda.pending import DeviceStep, LogprobsOnTheWay
from engine.runner.cuda.staging import NUM_BUFFERS, Mark, pinned
from engine.runner.halving import halves, joined
from engine.runner.inputs import prepare_inputs
from engine.runner.outcomes import no_token_allowed
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.runner.torch_runner import TorchRunner
from engine.sampling.grammar import GrammarError
from engine.sampling.on_device import DeviceDrawn, sample_on_device
from engine.sampling.sampler import SamplingRows, sample
from engine.types import ScheduledSequence, SchedulerOutput, SequenceResult, StepResult, TokenLogprobs

NO_ROWS = np.zeros(0, np.int64)
# What torch's, Triton's and the libraries' errors say when the device is lost.
LOST = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS", "CUDNN_STATUS", "CUDA driver error")


class DeviceRunner(TorchRunner):
    """See the module. `launch` from one thread, which also waits."""

    def __init__(
        self, *, max_num_seqs: int, graphs: Callable[[DeviceRunner], DecodeGraphs | None], **options: Any
    ) -> None:
        # A slot is taken before that of a sequence that ended in the same plan is free.
        self._num_rows = 2 * max_num_seqs
        super().__init__(**options, overlaps=False)
        self.graphs = graphs(self)
        self._finished_s = 0.0
        self._outstanding: DeviceStep | None = None
        self._drawn = [
            pinned(3, self._num_rows, dtype=torch.int64, device=self.device) for _ in range(NUM_BUFFERS)
        ]
        self._turn = 0

    @property
    def device_table(self) -> DeviceTable:
        """The table, as what it is here."""
        assert isinstance(self.table, DeviceTable), "made below"
        return self.table

    def _make_table(self) -> SequenceTable:
        return DeviceTable(
            num_rows=self._num_rows,
            num_columns=-(-self.model.max_model_len // self.storage.block_size),
            spare_block=self.storage.num_blocks,
            vocab_size=self.model.spec.vocab_size,
            max_model_len=self.model.max_model_len,
            device=self.device,
            grammar=self.grammar,
        )

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> PendingStep:
        """Queues a plan on the device. Raises RunnerBroken when the device is lost."""
        step = DeviceStep(step_id=plan.step_id, started_s=time.monotonic(), known=[], read=self._read)
        self.storage.announce(plan)
        try:
            self._launch(plan, step)
        except Exception as error:
            raise_if_broken(error)
            step.error = error
        return step

    def _launch(self, plan: SchedulerOutput, step: DeviceStep) -> None:
        if plan.forks:
            # A child starts with its parent's tokens.
            self._settle()
        self._apply(plan)
        sound, step.known = self._sorted_out(plan.scheduled)
        if not self._can_queue(sound):
            self._settle()
            self._finish(step, self._compute(sound)[0] if sound else [])
            return
        if not sound:
            self._finish(step, [])
            return
        table = self.device_table
        table.flush()
        try:
            self._queue(sound, step)
            return
        except torch.OutOfMemoryError:
            pass
        self._settle()
        self._finish(step, self._compute(sound)[0])

    def _compute(self, sound: list[ScheduledSequence]) -> tuple[list[SequenceResult], float]:
        """As TorchRunner does; a step that does not fit into memory is computed in halves."""
        self.device_table.flush()
        try:
            return super()._compute(sound)
        except torch.OutOfMemoryError:
            parts = halves(sound)
            if parts is None:
                raise
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        (first, first_s), (second, second_s) = (self._compute(part) for part in parts)
        return joined(first, second), first_s + second_s

    def _can_queue(self, sound: list[ScheduledSequence]) -> bool:
        """Whether nothing in the step needs tokens on the host before its forward."""
        states = self.table.states
        if self.proposer.config.method != "off":
            return False
        for sequence in sound:
            state = states[sequence.sequence_id]
            asked = state.sampling
            if sequence.draft_token_ids or asked.prompt_logprobs is not None or asked.beam_width:
                return False
            if state.slot >= self._num_rows:
                return False
        return True

    def _queue(self, sound: list[ScheduledSequence], step: DeviceStep) -> None:
        """Forward, draw and the copy of the tokens, without waiting."""
        states = [self.table.states[sequence.sequence_id] for sequence in sound]
        slots = np.array([state.slot for state in states], np.int64)
        starts = np.array([sequence.start for sequence in sound], np.int64)
        members = [index for index, sequence in enumerate(sound) if sequence.samples]
        plain = all(sequence.num_tokens == 1 for sequence in sound) and len(members) == len(sound)
        if plain and self.graphs is not None and self.graphs.size_for(len(sound)) is not None:
            hidden, slots_there = self._replay(self.graphs, slots, starts)
            ends = starts + 1
        else:
            hidden, slots_there, ends = self._forward(sound, states, slots, members)
        if members:
            everyone = len(members) == len(sound)
            step.sequence_ids = [sound[index].sequence_id for index in members]
            step.states = states if everyone else [states[index] for index in members]
            step.slots = slots[members]
            self._draw(hidden, slots_there, ends[members], step)
        mark = Mark(self.device)
        mark.set()
        step.mark = mark
        self._outstanding = step

    def _replay(
        self, graphs: DecodeGraphs, slots: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor]:
        table, size = self.device_table, self.storage.block_size
        table.ensure_columns(int(starts.max()) + 1)
        tokens = np.where(table.num_unread[slots] > 0, UNREAD, table.tokens[slots, starts])
        places = table.blocks[slots, starts // size] * size + starts % size
        return graphs.run(tokens, starts, places, slots)

    def _forward(
        self,
        sound: list[ScheduledSequence],
        states: list[SequenceState],
        slots: NDArray[np.int64],
        members: list[int],
    ) -> tuple[Tensor, Tensor, NDArray[np.int64]]:
        """Hidden states of the sampling rows [R, E], their slots on the device [R], and where each sequence
        ends [S].
        """
        table = self.device_table
        inputs = prepare_inputs(
            sound,
            table,
            block_size=self.storage.block_size,
            spare_slot=self.storage.spare_slot,
            device=self.device,
            row_multiple=self.model.row_multiple,
        )
        unread = np.flatnonzero(table.num_unread[slots] > 0)
        sampling = np.array(members, np.int64)
        last = inputs.query_starts[1:] - 1
        # One copy: who takes a token from the device, and who samples.
        there = on_device(
            np.concatenate((last[unread], slots[unread], last[sampling], slots[sampling])), self.device
        )
        places, sources, rows, slots_there = torch.split(
            there, [unread.size, unread.size, sampling.size, sampling.size]
        )
        if unread.size:
            inputs.batch.token_ids.index_copy_(0, places, table.last_tokens.index_select(0, sources))
        hidden = self.model.forward(inputs.batch, self.storage.layers, self.attention)
        ends = inputs.batch.ragged.context_lens
        return hidden.index_select(0, rows), slots_there, ends

    def _draw(self, hidden: Tensor, slots_there: Tensor, ends: NDArray[np.int64], step: DeviceStep) -> None:
        """Draws for the first rows of hidden [B, E], and queues what the host will read."""
        count, table = len(step.states), self.device_table
        num_prompt = np.array([state.num_prompt for state in step.states], np.int64)
        logits = self._logits(hidden)[:count]
        grammar_rows, masks = self._masks(step)
        drawn = self._sampled(
            logits,
            SamplingRows(
                slots=step.slots,
                positions=ends - num_prompt,
                draft_rows=NO_ROWS,
                draft_tokens=NO_ROWS,
                grammar_rows=grammar_rows,
                grammar_masks=masks,
            ),
        )
        table.set_last_tokens(slots_there, drawn.tokens)
        self._turn = (self._turn + 1) % NUM_BUFFERS
        step.drawn = self._drawn[self._turn].view(-1)[: 3 * count].view(3, count)
        step.drawn.copy_(drawn.packed(), non_blocking=True)
        step.logprobs = self._logprobs(logits, drawn.tokens, step)
        # Last, since nothing may be counted twice when memory runs out on the way.
        table.sampling.append_there(step.slots, drawn.tokens)
        table.num_unread[step.slots] += 1

    def _logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, E] -> [B or more, V]."""
        missing = -hidden.shape[0] % self.model.row_multiple
        if missing:
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, missing))
        assert isinstance(self.model, Decoder), "the native kernels are for CPUs"
        return self.model.logits(hidden)

    def _sampled(self, logits: Tensor, rows: SamplingRows) -> DeviceDrawn:
        if self.table.sampling.backend == "triton":
            return sample_on_device(logits, self.table.sampling, rows)
        drawn = sample(logits, self.table.sampling, rows)
        tokens, finite, allowed = (
            on_device(each, self.device) for each in (drawn.tokens, drawn.finite, drawn.allowed)
        )
        return DeviceDrawn(tokens=tokens, finite=finite, allowed=allowed, processed=drawn.processed)

    def _masks(self, step: DeviceStep) -> tuple[NDArray[np.int64], NDArray[np.int32] | None]:
        """Masks of the rows under a grammar, which must know the tokens of the step before."""
        rows = [row for row, state in enumerate(step.states) if state.matcher is not None]
        if not rows:
            return NO_ROWS, None
        self._settle()
        matchers = [step.states[row].matcher for row in rows]
        filled = self.grammar.fill([(matcher, ()) for matcher in matchers if matcher is not None]).result()
        step.guided = True
        step.grammar_problems = dict(zip(rows, filled.problems, strict=True))
        step.grammar_s = filled.seconds / len(rows)
        return np.array(rows, np.int64), filled.masks

    def _logprobs(self, logits: Tensor, tokens: Tensor, step: DeviceStep) -> LogprobsOnTheWay | None:
        wanted = self.table.sampling.logprobs
        if not wanted:
            return None
        picked = [(row, wanted[slot]) for row, slot in enumerate(step.slots.tolist()) if slot in wanted]
        if not picked:
            return None
        rows = on_device(np.array([row for row, _ in picked], np.int64), self.device)
        normalized = torch.log_softmax(logits.index_select(0, rows), dim=-1)
        chosen = normalized.gather(1, tokens.index_select(0, rows)[:, None])[:, 0]
        most = min(max(count for _, count in picked), logits.shape[1])
        best = torch.topk(normalized, most, dim=-1)
        found = []
        for each in (chosen, best.indices, best.values):
            host = pinned(*each.shape, dtype=each.dtype, device=self.device)
            found.append(host.copy_(each, non_blocking=True))
        return LogprobsOnTheWay(rows=picked, chosen=found[0], ids=found[1], values=found[2])

    def _settle(self) -> None:
        """Lets the outstanding step finish and reads its tokens. What made it fail is its own affair."""
        outstanding = self._outstanding
        if outstanding is None:
            return
        try:
            self._read(outstanding)
        except RunnerBroken:
            raise
        except Exception as error:
            outstanding.error = error
            self._outstanding = None

    @torch.inference_mode()
    def _read(self, step: DeviceStep) -> StepResult:
        """The step's result, once the device has come so far."""
        if step.error is not None:
            raise step.error
        if step.result is None:
            if self._outstanding is step:
                self._outstanding = None
            assert step.mark is not None, "launched"
            try:
                step.mark.wait()
            except Exception as error:
                raise_if_broken(error)
                raise
            self._finish(step, self._results(step) if step.states else [])
        assert step.result is not None, "finished"
        return step.result

    def _finish(self, step: DeviceStep, results: list[SequenceResult]) -> None:
        now = time.monotonic()
        # While the step before it ran, the device had not begun.
        began = max(step.started_s, self._finished_s)
        self._finished_s = now
        step.result = StepResult(step.step_id, (*step.known, *results), compute_s=now - began)

    def _results(self, step: DeviceStep) -> list[SequenceResult]:
        """Takes the tokens in: grammars move along, tables grow."""
        assert step.drawn is not None, "rows were drawn"
        tokens, finite, allowed = step.drawn.numpy()
        states, table = self.table.states, self.device_table
        alive = np.array(
            [
                states.get(sequence_id) is state
                for sequence_id, state in zip(step.sequence_ids, step.states, strict=True)
            ],
            np.bool_,
        )
        if alive.any():
            table.append_one_each(step.slots[alive], tokens[alive])
        table.num_unread[step.slots[alive]] -= 1
        drawn = tokens.tolist()
        if not step.guided and step.logprobs is None and finite.all() and allowed.all():
            return [
                SequenceResult(sequence_id, (token,))
                for sequence_id, token in zip(step.sequence_ids, drawn, strict=True)
            ]
        reports = _reports(step.logprobs, drawn)
        return [
            self._result(step, row, token, bool(finite[row]), bool(allowed[row]), reports.get(row, ()))
            for row, token in enumerate(drawn)
        ]

    @staticmethod
    def _result(
        step: DeviceStep,
        row: int,
        token: int,
        finite: bool,
        allowed: bool,
        report: tuple[TokenLogprobs, ...],
    ) -> SequenceResult:
        state, sequence_id = step.states[row], step.sequence_ids[row]
        problem, field = step.grammar_problems.get(row, "") or state.failure, ""
        if not problem and not finite:
            problem = "the model's logits are not finite"
        elif not problem and not allowed:
            problem, field = no_token_allowed(state)
        matcher = state.matcher
        if not problem and matcher is not None:
            try:
                matcher.accept((token,))
            except GrammarError as error:
                problem = str(error)
        if problem:
            state.failure = problem
            return SequenceResult(sequence_id, (), failure=problem, failure_field=field)
        return SequenceResult(
            sequence_id,
            (token,),
            logprobs=report,
            grammar_finished=matcher is not None and matcher.finished,
            grammar_s=step.grammar_s if matcher is not None else 0.0,
        )


def _reports(found: LogprobsOnTheWay | None, tokens: list[int]) -> dict[int, tuple[TokenLogprobs, ...]]:
    """Row to its report."""
    if found is None:
        return {}
    parts = zip(found.rows, found.chosen.tolist(), found.ids.tolist(), found.values.tolist(), strict=True)
    return {
        row: (TokenLogprobs(tokens[row], chosen, tuple(ids[:count]), tuple(values[:count])),)
        for (row, count), chosen, ids, values in parts
    }


def raise_if_broken(error: Exception) -> None:
    """Raises RunnerBroken for an error after which no later work on the device can succeed. (Out of memory is
    not one.)
    """
    if isinstance(error, torch.OutOfMemoryError | RunnerBroken) or "out of memory" in str(error):
        return
    if isinstance(error, RuntimeError) and any(mark in str(error) for mark in LOST):
        raise RunnerBroken(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
