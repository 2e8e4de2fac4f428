"""Steps on a GPU: queued while the one before runs, and waiting for nothing.

What the step before draws is fed on the device (DeviceTable.last_tokens), so the host reads tokens one step
late. Decode rows, drafts behind them included, replay captured graphs where there are some, alone or beside
prompts; these follow eagerly, and all rows draw together. Which drafts the draws confirm is found out on the
device, too: rows of the next step begin as many positions earlier as were rejected. A step that needs to know
tokens before it is computed (forks, beams, log-probabilities of prompts, drafts that no graph takes) is the
torch executor's, once the outstanding one has finished. Rows under a grammar need them only for their masks:
those are filled while their forward runs.

Shape letters: S sequences, R rows that sample, E hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.model.decoder import Decoder
from engine.model.forward_batch import ForwardBatch
from engine.runner.base import RunnerBroken
from engine.runner.cuda.acceptance import accept
from engine.runner.cuda.arrival import DeviceArrival, LogprobsOnTheWay
from engine.runner.cuda.decode_graphs import UNREAD, DecodeGraphs
from engine.runner.cuda.device_table import DeviceTable
from engine.runner.cuda.staging import NUM_BUFFERS, Mark, pinned
from engine.runner.executors.executor import Executor, StepTooLargeError
from engine.runner.executors.torch import TorchExecutor
from engine.runner.inputs import StepInputs, prepare_inputs
from engine.runner.kv_storage import KvStorage
from engine.runner.outcomes import LogitRows, Sampled, logit_rows, sampling_rows
from engine.sampling.table import sample
from engine.types import ScheduledSequence
from kernels.attention.backends import AttentionBackend
from kernels.host import on_device
from kernels.sampling.noise import row_keys
from kernels.sampling.on_device import DeviceDrawn, sample_on_device
from kernels.sampling.rows import SamplingRows

# Parts of the messages of torch, Triton and the libraries when the device is lost.
LOST = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS", "CUDNN_STATUS", "CUDA driver error")


class DeviceExecutor(Executor):
    """See Executor. `graphs` captures decode steps, or says None."""

    model: Decoder

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        storage: KvStorage,
        table: DeviceTable,
        *,
        graphs: Callable[[DeviceExecutor], DecodeGraphs | None],
    ) -> None:
        self.model = model
        self.attention, self.storage, self.table = attention, storage, table
        self._eager = TorchExecutor(model, attention, storage, table)
        self._turn = 0
        self._ran_out = False
        self.graphs = graphs(self)
        # Captured rows, and those of prompts that end.
        most = table.num_rows + (self.graphs.sizes[-1] if self.graphs else 0)
        self._drawn = [pinned(3, most, dtype=torch.int64, device=model.device) for _ in range(NUM_BUFFERS)]

    def mode(self) -> AbstractContextManager[object]:
        return torch.inference_mode()

    def runs_ahead(self, scheduled: Sequence[ScheduledSequence]) -> bool:
        """Whether nothing in the step needs tokens on the host before its forward."""
        table = self.table
        if table.pool is not None:
            return False
        captured: bool | None = None
        someone_drafts = bool(table.unread_drafts.any())
        for sequence in scheduled:
            state = table.states[sequence.sequence_id]
            asked = state.sampling
            if asked.prompt_logprobs is not None or asked.beam_width or state.slot >= table.num_rows:
                return False
            if state.forgotten is not None or state.votes is not None:
                return False
            unread = int(table.unread_drafts[state.slot]) if someone_drafts else 0
            if not unread and not sequence.draft_token_ids:
                continue
            if captured is None:
                captured = self._captured_first(scheduled)[1] > 0
            # Where it is, only graphs know; and how many tokens it has must be known while they are too few.
            num_output = sequence.start - unread - state.num_prompt + 1
            if not (captured and self._is_decode(sequence)) or (unread and num_output < asked.min_tokens):
                return False
        return True

    def prepare(self, scheduled: list[ScheduledSequence], *, ahead: bool) -> StepInputs:
        if self._ran_out and self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        self._ran_out = False
        with self._fitting():
            self.table.flush()
            num_captured = 0
            if ahead:
                scheduled, num_captured = self._captured_first(scheduled)
            inputs = prepare_inputs(scheduled, self.table, self.storage, self.model, num_captured)
        inputs.ahead = ahead
        return inputs

    def _captured_first(self, scheduled: Sequence[ScheduledSequence]) -> tuple[list[ScheduledSequence], int]:
        """The same rows, those that graphs compute first; and of how many sequences these are."""
        decodes = [each for each in scheduled if self._is_decode(each)]
        num_rows = sum(each.num_tokens for each in decodes)
        if self.graphs is None or not decodes or self.graphs.size_for(num_rows) is None:
            return list(scheduled), 0
        if len(decodes) == len(scheduled):
            return decodes, len(decodes)
        return decodes + [each for each in scheduled if not self._is_decode(each)], len(decodes)

    def _is_decode(self, scheduled: ScheduledSequence) -> bool:
        """Whether a sequence computes nothing but its last token, and drafts; graphs look at all of a block
        table, so one that forgets some of it is computed like a prompt.
        """
        is_last = scheduled.samples and scheduled.num_tokens == 1 + len(scheduled.draft_token_ids)
        return is_last and self.table.states[scheduled.sequence_id].kept is None

    def execute(self, inputs: StepInputs) -> Sampled:
        with self._fitting():
            return self._queue(inputs) if inputs.ahead else self._eager.execute(inputs)

    def raise_if_broken(self, error: Exception) -> None:
        raise_if_broken(error)

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            self._ran_out = True
            raise StepTooLargeError from error

    def _queue(self, inputs: StepInputs) -> Sampled:
        """Forward, draw and the copy of the tokens, without waiting."""
        began_s = time.monotonic()
        rows = logit_rows(inputs)
        unread_drafts = self.table.unread_drafts[rows.slots]
        # Captured rows come first: the device has work while the host launches the others one by one.
        parts = [self._replay(self.graphs, inputs)] if inputs.num_captured and self.graphs else []
        if inputs.batch is not None:
            parts.append(self._forward(inputs.batch, inputs, rows))
        hidden, slots = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        mark = Mark(self.model.device)
        step = Sampled(inputs=inputs, rows=rows, began_s=began_s)
        step.arrival = arrival = DeviceArrival(step, self.table, mark)
        if rows.members:
            self._draw(hidden, slots, unread_drafts, step, arrival)
        mark.set()
        return step

    def _replay(self, graphs: DecodeGraphs, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Hidden states of the captured rows, and their slots on the device [R]."""
        table, count = self.table, inputs.num_captured
        bounds = inputs.query_starts[: count + 1]
        num_rows = int(bounds[-1])
        slots, positions = inputs.slots[:count], inputs.starts[:count]
        if num_rows > count:
            owners = np.repeat(np.arange(count), np.diff(bounds))
            within = np.arange(num_rows) - bounds[owners]
            slots, positions = slots[owners], positions[owners] + within
        tokens = np.where(table.num_unread[slots] > 0, UNREAD, table.tokens[slots, positions])
        if num_rows > count:
            drafts = (each.draft_token_ids for each in inputs.scheduled[:count])
            tokens[within > 0] = np.fromiter(chain.from_iterable(drafts), np.int64)
        behind = (table.unread_drafts[slots] > 0).astype(np.int64)
        hidden, there = graphs.run(tokens, positions, slots, behind)
        # Alone they keep the padding, so that logits need none of their own.
        return hidden if inputs.batch is None else hidden[:num_rows], there

    def _forward(self, batch: ForwardBatch, inputs: StepInputs, rows: LogitRows) -> tuple[Tensor, Tensor]:
        """Hidden states of the other rows that sample [R, E], and their slots on the device [R]."""
        table, num_captured = self.table, int(inputs.query_starts[inputs.num_captured])
        slots = inputs.slots[inputs.num_captured :]
        unread = np.flatnonzero(table.num_unread[slots] > 0)
        last = batch.ragged.query_starts[1:] - 1
        sampling, sampled_slots = rows.tokens[num_captured:] - num_captured, rows.slots[num_captured:]
        # One copy: who takes a token from the device, and who samples.
        there = on_device(
            np.concatenate((last[unread], slots[unread], sampling, sampled_slots)), self.model.device
        )
        unread_rows, sources, wanted, slots_there = torch.split(
            there, [unread.size, unread.size, sampling.size, sampling.size]
        )
        if unread.size:
            batch.token_ids.index_copy_(0, unread_rows, table.last_tokens.index_select(0, sources))
        hidden = self.model.forward(batch, self.storage.layers, self.attention)
        return hidden.index_select(0, wanted), slots_there

    def _draw(
        self,
        hidden: Tensor,
        slots_there: Tensor,
        unread_drafts: NDArray[np.int64],
        step: Sampled,
        arrival: DeviceArrival,
    ) -> None:
        """Draws for the first rows of hidden [B, E], and queues what the host will read. Before rows [R] were
        `unread_drafts` of their sequence when the forward was queued: masks may have them read.
        """
        rows, table = step.rows, self.table
        count = rows.tokens.size
        logits = self._logits(hidden)[:count]
        step.masks = step.inputs.masks()
        asked = sampling_rows(step.inputs, rows, step.masks)
        if unread_drafts.any():
            asked = self._gone_back(asked, slots_there, unread_drafts)
        drawn = self._sampled(logits, asked)
        accepted = None if rows.one_each else accept(drawn.tokens, step.inputs, rows)
        if accepted is None:
            table.set_last_tokens(slots_there, drawn.tokens)
        else:
            members = slots_there.index_select(0, accepted.first_rows)
            table.set_last_tokens(members, drawn.tokens.index_select(0, accepted.last_rows))
            table.set_rejected(members, accepted.num_rejected)
        self._turn = (self._turn + 1) % NUM_BUFFERS
        arrival.drawn = self._drawn[self._turn].view(-1)[: 3 * count].view(3, count)
        arrival.drawn.copy_(drawn.packed(), non_blocking=True)
        arrival.reports = self._logprobs(logits, drawn.tokens, rows.slots)
        # Last, since nothing may be counted twice when memory runs out on the way.
        emitted = None if accepted is None else accepted.emitted
        table.sampling.append_there(rows.slots, drawn.tokens, emitted)
        table.num_unread[rows.member_slots] += 1
        table.unread_drafts[rows.member_slots] = rows.num_drafts
        step.counted = True

    def _gone_back(
        self, asked: SamplingRows, slots_there: Tensor, unread_drafts: NDArray[np.int64]
    ) -> SamplingRows:
        """The same where the device knows by how many drafts, of so many, a row lies before its position."""
        table = self.table.sampling
        uncertain = unread_drafts > 0
        behind = self.table.num_rejected.index_select(0, slots_there)
        if table.backend != "triton":
            # Such a draw waits for the device anyway.
            return replace(asked, positions=asked.positions - uncertain * behind.cpu().numpy())
        # A key for each number of drafts that may have been rejected.
        most = int(unread_drafts.max()) + 1
        back = np.arange(most) * uncertain[:, None]
        earlier = np.maximum(asked.positions[:, None] - back, 0).reshape(-1)
        options = np.repeat(table.options[asked.slots], most)
        keys = on_device(row_keys(options["seed"].copy(), options["choice"].copy(), earlier), behind.device)
        # Keys are gathered by the device's own counts, because the table's may be older; rows that are
        # certain have the same key for all.
        index = behind.clamp(max=most - 1)[:, None]
        return replace(asked, noise_keys=keys.view(-1, most).gather(1, index)[:, 0].contiguous())

    def _logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, E] -> [B or more, V]."""
        missing = -hidden.shape[0] % self.model.row_multiple
        if missing:
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, missing))
        return self.model.logits(hidden)

    def _sampled(self, logits: Tensor, rows: SamplingRows) -> DeviceDrawn:
        if self.table.sampling.backend == "triton":
            return sample_on_device(logits, self.table.sampling, rows)
        drawn = sample(logits, self.table.sampling, rows)
        tokens, finite, allowed = (
            on_device(each, self.model.device) for each in (drawn.tokens, drawn.finite, drawn.allowed)
        )
        return DeviceDrawn(tokens=tokens, finite=finite, allowed=allowed, processed=drawn.processed)

    def _logprobs(self, logits: Tensor, tokens: Tensor, slots: NDArray[np.int64]) -> LogprobsOnTheWay | None:
        wanted = self.table.sampling.logprobs
        if not wanted:
            return None
        picked = [(row, wanted[slot]) for row, slot in enumerate(slots.tolist()) if slot in wanted]
        if not picked:
            return None
        rows = on_device(np.array([row for row, _ in picked], np.int64), self.model.device)
        normalized = torch.log_softmax(logits.index_select(0, rows), dim=-1)
        chosen = normalized.gather(1, tokens.index_select(0, rows)[:, None])[:, 0]
        most = min(max(count for _, count in picked), logits.shape[1])
        best = torch.topk(normalized, most, dim=-1)
        found = []
        for each in (chosen, best.indices, best.values):
            host = pinned(*each.shape, dtype=each.dtype, device=self.model.device)
            found.append(host.copy_(each, non_blocking=True))
        return LogprobsOnTheWay(rows=picked, chosen=found[0], ids=found[1], values=found[2])


def raise_if_broken(error: Exception) -> None:
    """Raises RunnerBroken for an error after which no later work on the device can succeed. (Out of memory is
    not one.)
    """
    if isinstance(error, torch.OutOfMemoryError | RunnerBroken) or "out of memory" in str(error):
        return
    if isinstance(error, RuntimeError) and any(mark in str(error) for mark in LOST):
        raise RunnerBroken(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
