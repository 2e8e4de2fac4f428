"""Sampling options of all live sequences, as arrays by slot, so that a step picks its rows with one index.

Rows as wide as the vocabulary (biases, token counts) exist only for the sequences that need them.

Shape letters: N slots, W wide rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from engine.types import SamplingParams
from kernels.host import Device, Values, on_device, on_host
from kernels.sampling.native import NativeDraws, sampling_library
from kernels.sampling.rows import NO_ROW, OPTIONS, Drawn, SamplingRows

if TYPE_CHECKING:
    import torch

# Logits over a smaller temperature may overflow; so cold, the most likely token is all there is to draw.
COLDEST = 1e-6


class _WideRows:
    """A pool of rows [W, V] that grows by doubling: an array, or a tensor on a GPU."""

    def __init__(self, vocab_size: int, dtype: Any, device: Device) -> None:
        self._device = device
        self.rows: Any = self._zeros(0, vocab_size, dtype)
        self.num_rows = 0
        self._free: list[int] = []

    def _zeros(self, count: int, vocab_size: int, dtype: Any) -> Any:
        there = np.zeros((count, vocab_size), dtype)
        return there if self._device.type == "cpu" else on_device(there, self._device)

    @property
    def tensor(self) -> torch.Tensor:
        """The same memory as a tensor."""
        if not isinstance(self.rows, np.ndarray):
            found: torch.Tensor = self.rows
            return found
        import torch

        return torch.from_numpy(self.rows)

    def take(self) -> int:
        """Index of a row of zeros."""
        if not self._free:
            size, vocab_size = self.rows.shape
            if isinstance(self.rows, np.ndarray):
                more = np.zeros((max(4, size), vocab_size), self.rows.dtype)
                self.rows = np.concatenate((self.rows, more))
            else:
                grown = self.rows.new_zeros(size + max(4, size), vocab_size)
                grown[:size] = self.rows
                self.rows = grown
            self.num_rows = self.rows.shape[0]
            self._free = list(range(size, self.num_rows))[::-1]
        index = self._free.pop()
        self.rows[index] = 0
        return index

    def give_back(self, index: int) -> None:
        """The row may serve another sequence."""
        self._free.append(index)


class SamplingTable:
    """Options by slot. `counts` holds prompt and output occurrences of each token for penalties.

    `native` says whether the native kernels may draw and report; they take logits in main memory alone.
    """

    def __init__(self, vocab_size: int, device: Device) -> None:
        self.vocab_size = vocab_size
        self.native = True
        # The native sampler; made with the first draw.
        self.draws: Any = None
        # Name of what draws on a GPU (kernels/sampling).
        self.backend = "torch"
        self.options = np.zeros(0, OPTIONS)  # [N]
        # Whether the most likely token is all that is wanted, of logits as they are.
        self.plain = np.zeros(0, np.bool_)  # [N]
        self.biases = _WideRows(vocab_size, np.float32, device)
        # Occurrences in the output, and whether a token is in prompt or output.
        self.output_counts = _WideRows(vocab_size, np.int32, device)
        self.seen = _WideRows(vocab_size, np.bool_, device)
        self.stop_ids: dict[int, tuple[int, ...]] = {}
        self.logprobs: dict[int, int] = {}

    def grow(self, num_slots: int) -> None:
        """Makes room for slots 0..num_slots-1."""
        grown = np.zeros(num_slots, OPTIONS)
        grown[: self.options.size] = self.options
        self.options = grown
        self.plain = np.concatenate((self.plain, np.zeros(num_slots - self.plain.size, np.bool_)))

    def put(
        self,
        slot: int,
        params: SamplingParams,
        choice: int,
        prompt: NDArray[np.int64],
        output: NDArray[np.int64],
    ) -> None:
        """Takes in a sequence. Token ids are within the vocabulary (see `problem_with`)."""
        own = {
            "temperature": params.temperature if params.temperature >= COLDEST else 0.0,
            "seed": params.seed & 0xFFFF_FFFF_FFFF_FFFF,
            "choice": choice,
            "bias_row": self._put_bias(params),
            "count_row": self._put_counts(params, prompt, output),
        }
        self.options[slot] = tuple(
            own[name] if name in own else getattr(params, name) for name in OPTIONS.names or ()
        )
        row = self.options[slot]
        self.plain[slot] = (
            row["temperature"] == 0
            and row["bias_row"] == NO_ROW
            and row["count_row"] == NO_ROW
            and not params.min_tokens
        )
        if params.min_tokens > 0 and params.stop_token_ids:
            self.stop_ids[slot] = params.stop_token_ids
        if params.logprobs is not None:
            self.logprobs[slot] = params.logprobs

    def drop(self, slot: int) -> None:
        """Forgets a sequence."""
        row = self.options[slot]
        if row["bias_row"] != NO_ROW:
            self.biases.give_back(int(row["bias_row"]))
        if row["count_row"] != NO_ROW:
            self.output_counts.give_back(int(row["count_row"]))
            self.seen.give_back(int(row["count_row"]))
        self.stop_ids.pop(slot, None)
        self.logprobs.pop(slot, None)

    def append(self, slots: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Counts one new output token per entry; a slot may occur several times."""
        if not self.output_counts.num_rows:
            # Nobody has asked for penalties so far.
            return
        rows = self.options["count_row"][slots]
        counted = rows != NO_ROW
        if not counted.any():
            return
        wide, new = rows[counted], tokens[counted]
        if isinstance(self.seen.rows, np.ndarray):
            np.add.at(self.output_counts.rows, (wide, new), 1)
            self.seen.rows[wide, new] = True
            return
        device = self.seen.rows.device
        index = (on_device(wide, device), on_device(new, device))
        ones = on_device(np.ones(wide.size, np.int32), device)
        self.output_counts.rows.index_put_(index, ones, accumulate=True)
        self.seen.rows[index] = True

    def append_there(
        self, slots: NDArray[np.int64], tokens: torch.Tensor, emitted: torch.Tensor | None = None
    ) -> None:
        """Counts one new output token [R] for each of slots [R], tokens staying on the device: of those that
        are `emitted` [R], where some are not. A slot may then occur several times.
        """
        rows = self.options["count_row"][slots]
        counted = np.flatnonzero(rows != NO_ROW)
        if not counted.size:
            return
        wide, counted_rows = on_device(np.stack((rows[counted], counted)), tokens.device)
        index = (wide, tokens.index_select(0, counted_rows))
        counts, seen = self.output_counts.tensor, self.seen.tensor
        if emitted is None:
            counts.index_put_(index, wide.new_ones(wide.shape).int(), accumulate=True)
            seen.index_put_(index, wide.new_ones(wide.shape).bool())
            return
        counts.index_put_(index, emitted.index_select(0, counted_rows).int(), accumulate=True)
        # The same token may be emitted by one row and not by another: both write the same.
        seen.index_put_(index, seen[index] | (counts[index] > 0))

    def _put_bias(self, params: SamplingParams) -> int:
        if not params.logit_bias and not params.allowed_token_ids:
            return NO_ROW
        row = self.biases.take()
        biases = np.zeros(self.vocab_size, np.float32)
        if params.allowed_token_ids:
            biases.fill(-np.inf)
            biases[list(params.allowed_token_ids)] = 0.0
        for token, bias in params.logit_bias.items():
            biases[token] += bias
        self._write(self.biases, row, biases)
        return row

    def _put_counts(
        self, params: SamplingParams, prompt: NDArray[np.int64], output: NDArray[np.int64]
    ) -> int:
        if not (params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0):
            return NO_ROW
        row, seen_row = self.output_counts.take(), self.seen.take()
        assert row == seen_row, "both pools hand out the same rows"
        seen = np.zeros(self.vocab_size, np.bool_)
        seen[prompt] = seen[output] = True
        self._write(self.output_counts, row, np.bincount(output, minlength=self.vocab_size))
        self._write(self.seen, row, seen)
        return row

    @staticmethod
    def _write(pool: _WideRows, row: int, values: NDArray[Any]) -> None:
        if isinstance(pool.rows, np.ndarray):
            pool.rows[row] = values
        else:
            pool.rows[row].copy_(on_device(values, pool.rows.device))


def problem_with(params: SamplingParams, vocab_size: int) -> str:
    """Why these options cannot be used with this vocabulary; empty when they can."""
    ids = {
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids,
        "stop_token_ids": params.stop_token_ids,
    }
    for field, tokens in ids.items():
        bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if bad is not None:
            return f"{field}: token id {bad} is outside the vocabulary of {vocab_size} tokens"
    return ""


# One draw per row, over all rows of a step at once.
# Order: penalties, biases and allowed tokens, stop tokens before min_tokens, grammar; then temperature,
# min-p, top-k, top-p; then Gumbel-max with counter-based noise, or the most likely token where the
# temperature is 0. A feature that no row uses costs nothing, and no feature looks at more than its own row.
# On a CPU the native kernels do all of it where they can be had; `kernels.sampling.reference` is theirs.
# Shape letters: R rows, V vocabulary.

if TYPE_CHECKING:
    from torch import Tensor


def sample(logits: Values, table: SamplingTable, rows: SamplingRows) -> Drawn:
    """Draws one token per row of logits [R, V] (float32, left as it is)."""
    library = sampling_library() if table.native and on_host(logits) is not None else None
    if table.backend == "triton":
        from kernels.sampling.on_device import sample_on_device

        return sample_on_device(cast("Tensor", logits), table, rows).fetched()
    if library is None:
        from kernels.sampling.reference import sample_by_torch

        return sample_by_torch(cast("Tensor", logits), table, rows)
    if table.draws is None:
        table.draws = NativeDraws(library)
    tokens, finite, allowed, processed = table.draws.draw(logits, table, rows)
    return Drawn(tokens=tokens, finite=finite, allowed=allowed, processed=processed)
