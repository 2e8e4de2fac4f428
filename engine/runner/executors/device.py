"""Steps on a GPU: queued while the one before runs, and waiting for nothing.

What the step before draws is fed on the device (DeviceTable.last_tokens), so the host reads tokens one step
late. Decode rows replay captured graphs where there are some, alone or beside prompts; these follow eagerly,
and all rows draw together. A step that needs to know tokens before it is computed (drafts, forks, beams,
log-probabilities of prompts) is the torch executor's, once the outstanding one has finished. Rows under a
grammar need them only for their masks: those are filled while their forward runs.

Shape letters: S sequences, R rows that sample, E hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.attention import AttentionBackend
from engine.kernels.sampling.on_device import DeviceDrawn, sample_on_device
from engine.kernels.sampling.rows import SamplingRows
from engine.kernels.transfer import on_device
from engine.model.decoder import Decoder
from engine.model.forward_batch import ForwardBatch
from engine.runner.base import RunnerBroken
from engine.runner.cuda.arrival import DeviceArrival, LogprobsOnTheWay
from engine.runner.cuda.decode_graphs import UNREAD, DecodeGraphs
from engine.runner.cuda.device_table import DeviceTable
from engine.runner.cuda.staging import NUM_BUFFERS, Mark, pinned
from engine.runner.executors.executor import Executor, StepTooLargeError
from engine.runner.executors.torch import TorchExecutor
from engine.runner.inputs import StepInputs, prepare_inputs
from engine.runner.kv_storage import KvStorage
from engine.runner.outcomes import Sampled
from engine.runner.verification import LogitRows, logit_rows, sampling_rows
from engine.sampling.sampler import sample
from engine.types import ScheduledSequence

# What torch's, Triton's and the libraries' errors say when the device is lost.
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
        self._drawn = [
            pinned(3, table.num_rows, dtype=torch.int64, device=model.device) for _ in range(NUM_BUFFERS)
        ]
        self._turn = 0
        self._ran_out = False
        self.graphs = graphs(self)

    def mode(self) -> AbstractContextManager[object]:
        return torch.inference_mode()

    def runs_ahead(self, scheduled: Sequence[ScheduledSequence]) -> bool:
        """Whether nothing in the step needs tokens on the host before its forward."""
        states = self.table.states
        for sequence in scheduled:
            state = states[sequence.sequence_id]
            asked = state.sampling
            if sequence.draft_token_ids or asked.prompt_logprobs is not None or asked.beam_width:
                return False
            if state.slot >= self.table.num_rows:
                return False
        return True

    def prepare(self, scheduled: list[ScheduledSequence], *, ahead: bool) -> StepInputs:
        if self._ran_out and self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        self._ran_out = False
        with self._fitting():
            self.table.flush()
            num_captured = 0
            if ahead and self.graphs is not None:
                scheduled, num_captured = _decodes_first(scheduled)
                if self.graphs.size_for(num_captured) is None:
                    num_captured = 0
            inputs = prepare_inputs(scheduled, self.table, self.storage, self.model, num_captured)
        inputs.ahead = ahead
        return inputs

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
        # Captured rows come first: the device has work while the host launches the others one by one.
        parts = [self._replay(self.graphs, inputs)] if inputs.num_captured and self.graphs else []
        if inputs.batch is not None:
            parts.append(self._forward(inputs.batch, inputs, rows))
        hidden, slots = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        mark = Mark(self.model.device)
        step = Sampled(inputs=inputs, rows=rows, began_s=began_s)
        step.arrival = arrival = DeviceArrival(step, self.table, mark)
        if rows.members:
            self._draw(hidden, slots, step, arrival)
        mark.set()
        return step

    def _replay(self, graphs: DecodeGraphs, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Hidden states of the captured rows, and their slots on the device [S]."""
        table, size, count = self.table, self.storage.block_size, inputs.num_captured
        slots, starts = inputs.slots[:count], inputs.starts[:count]
        tokens = np.where(table.num_unread[slots] > 0, UNREAD, table.tokens[slots, starts])
        places = table.blocks[slots, starts // size] * size + starts % size
        hidden, there = graphs.run(tokens, starts, places, slots)
        # Alone they keep the padding, so that logits need none of their own.
        return hidden if inputs.batch is None else hidden[:count], there

    def _forward(self, batch: ForwardBatch, inputs: StepInputs, rows: LogitRows) -> tuple[Tensor, Tensor]:
        """Hidden states of the other rows that sample [R, E], and their slots on the device [R]."""
        table, count = self.table, inputs.num_captured
        slots = inputs.slots[count:]
        unread = np.flatnonzero(table.num_unread[slots] > 0)
        last = batch.ragged.query_starts[1:] - 1
        # One copy: who takes a token from the device, and who samples.
        there = on_device(
            np.concatenate((last[unread], slots[unread], rows.tokens[count:] - count, rows.slots[count:])),
            self.model.device,
        )
        num_rows = rows.tokens.size - count
        places, sources, sampling, slots_there = torch.split(
            there, [unread.size, unread.size, num_rows, num_rows]
        )
        if unread.size:
            batch.token_ids.index_copy_(0, places, table.last_tokens.index_select(0, sources))
        hidden = self.model.forward(batch, self.storage.layers, self.attention)
        return hidden.index_select(0, sampling), slots_there

    def _draw(self, hidden: Tensor, slots_there: Tensor, step: Sampled, arrival: DeviceArrival) -> None:
        """Draws for the first rows of hidden [B, E], and queues what the host will read."""
        rows, table = step.rows, self.table
        count = len(rows.members)
        logits = self._logits(hidden)[:count]
        step.masks = step.inputs.masks()
        drawn = self._sampled(logits, sampling_rows(step.inputs, rows, step.masks))
        table.set_last_tokens(slots_there, drawn.tokens)
        self._turn = (self._turn + 1) % NUM_BUFFERS
        arrival.drawn = self._drawn[self._turn].view(-1)[: 3 * count].view(3, count)
        arrival.drawn.copy_(drawn.packed(), non_blocking=True)
        arrival.reports = self._logprobs(logits, drawn.tokens, rows.slots)
        # Last, since nothing may be counted twice when memory runs out on the way.
        table.sampling.append_there(rows.slots, drawn.tokens)
        table.num_unread[rows.slots] += 1
        step.counted = True

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


def _decodes_first(scheduled: Sequence[ScheduledSequence]) -> tuple[list[ScheduledSequence], int]:
    """The same rows, those of one token that sample first; and how many these are."""
    decodes = [each for each in scheduled if each.num_tokens == 1 and each.samples]
    return decodes + [each for each in scheduled if each.num_tokens > 1 or not each.samples], len(decodes)


def raise_if_broken(error: Exception) -> None:
    """Raises RunnerBroken for an error after which no later work on the device can succeed. (Out of memory is
    not one.)
    """
    if isinstance(error, torch.OutOfMemoryError | RunnerBroken) or "out of memory" in str(error):
        return
    if isinstance(error, RuntimeError) and any(mark in str(error) for mark in LOST):
        raise RunnerBroken(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
