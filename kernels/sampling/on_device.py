"""The draw by kernels on the device, without a word from the device to the host: what a row asks for goes
there in one copy, and tokens stay until they are fetched.

It draws what `reference.sample_by_torch` draws, which is its reference.

Shape letters: R rows, V vocabulary, W wide rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.host import on_device
from kernels.sampling.noise import row_keys
from kernels.sampling.rows import (
    NO_ROW,
    OPTIONS,
    Drawn,
    SamplingRows,
    Tables,
    early_stops,
    forbidden_tokens,
)

# Options that kernels read of each row: all but those that are applied before the launch.
_COLUMNS = tuple(name for name in OPTIONS.names or () if name not in {"seed", "choice", "min_tokens"})


@dataclass(frozen=True, kw_only=True)
class DeviceDrawn:
    """Outcome per row, on the device."""

    tokens: Tensor  # [R] int64
    finite: Tensor  # [R] bool, or 0 and 1: the model's logits were finite
    allowed: Tensor  # [R] bool, or 0 and 1: at least one token was allowed
    processed: Tensor  # [R, V] logits after penalties, biases and masks
    # The first three, where they were written as one.
    outcome: Tensor | None = None  # [3, R] int64

    def packed(self) -> Tensor:
        """Tokens, finite and allowed as one tensor [3, R] int64: one copy to the host takes them all."""
        if self.outcome is not None:
            return self.outcome
        return torch.stack((self.tokens, self.finite.long(), self.allowed.long()))

    def fetched(self) -> Drawn:
        """The same on the host, after one wait."""
        tokens, finite, allowed = self.packed().cpu().numpy()
        return Drawn(tokens=tokens, finite=finite != 0, allowed=allowed != 0, processed=self.processed)


def sample_on_device(logits: Tensor, table: Tables, rows: SamplingRows) -> DeviceDrawn:
    """Draws one token per row of logits [R, V] (float32, left as it is). Nothing waits for the device."""
    from kernels.sampling.triton_sampling import RowOptions, changed, draw, process

    device = logits.device
    asked = RowOptions(**row_options(table, rows, device))
    stops = early_stops(table, rows)
    processed = process(logits.contiguous(), asked, copy=bool(stops))
    if stops:
        _forbid(processed.logits, stops, rows, device)
        processed = changed(processed, asked)
    outcome = draw(processed, asked)
    tokens, finite, allowed = outcome.unbind()
    return DeviceDrawn(
        tokens=tokens, finite=finite, allowed=allowed, processed=processed.logits, outcome=outcome
    )


def row_options(table: Tables, rows: SamplingRows, device: torch.device) -> dict[str, Any]:
    """What each row asks for, on the device: the fields of the kernels' RowOptions. One copy for all of them
    but masks and drafts.
    """
    options = table.options[rows.slots]
    count = len(options)
    mask_row = np.full(count, NO_ROW, np.int32)
    masks: Tensor | None = None
    if rows.grammar_masks is not None and rows.grammar_rows.size:
        mask_row[rows.grammar_rows] = np.arange(rows.grammar_rows.size)
        masks = on_device(np.ascontiguousarray(rows.grammar_masks, np.int32), device)
    penalized, biased = (bool((options[name] != NO_ROW).any()) for name in ("count_row", "bias_row"))
    counts, seen = table.output_counts.tensor, table.seen.tensor
    count_row = options["count_row"]
    if penalized and rows.draft_rows.size:
        counts, seen, count_row = with_drafts(table, rows, options, device)
    columns = {name: options[name] for name in _COLUMNS} | {"count_row": count_row, "mask_row": mask_row}
    asked = carried(rows, options, columns, device) | {"filters": _filtered(options)}
    asked |= {"output_counts": counts, "seen": seen} if penalized else {"count_row": None}
    asked |= {"biases": table.biases.tensor} if biased else {"bias_row": None}
    return asked | ({"masks": masks} if masks is not None else {"mask_row": None})


def carried(
    rows: SamplingRows, options: NDArray[np.void], columns: dict[str, NDArray[Any]], device: torch.device
) -> dict[str, Any]:
    """Keys [R] int64 and columns [R] of four bytes each, on the device after one copy. Each begins at a
    multiple of 16 bytes whatever the number of rows, because kernels are compiled anew for pointers that do
    not. Keys are left out where the device has its own.
    """
    count = len(options)
    width = -(-count // 4) * 4
    packed = np.zeros((2 + len(columns), width), np.int32)
    if rows.noise_keys is None:
        keys = row_keys(options["seed"].copy(), options["choice"].copy(), rows.positions)
        packed[:2].reshape(-1).view(np.int64)[:count] = keys
    is_float = {name: values.dtype == np.float32 for name, values in columns.items()}
    for column, (name, values) in zip(packed[2:], columns.items(), strict=True):
        (column.view(np.float32) if is_float[name] else column)[:count] = values
    there = on_device(packed, device)
    found: dict[str, Any] = {
        name: column.view(torch.float32) if is_float[name] else column
        for name, column in zip(columns, there[2:], strict=True)
    }
    own = rows.noise_keys
    return found | {"noise_keys": there[:2].view(-1).view(torch.int64)[:count] if own is None else own}


def _filtered(options: NDArray[np.void]) -> bool:
    """Whether any row asks for top-k or top-p."""
    return bool(((options["temperature"] > 0) & ((options["top_k"] > 0) | (options["top_p"] < 1))).any())


def with_drafts(
    table: Tables, rows: SamplingRows, options: NDArray[np.void], device: torch.device
) -> tuple[Tensor, Tensor, NDArray[np.int64]]:
    """Counts and occurrences of the penalized rows with their drafts, and each row's index there."""
    chosen = np.flatnonzero(options["count_row"] != NO_ROW)
    offset = np.full(len(options), NO_ROW, np.int64)
    offset[chosen] = np.arange(chosen.size)
    wide = on_device(options["count_row"][chosen], device)
    counts, seen = table.output_counts.tensor[wide], table.seen.tensor[wide]
    kept = offset[rows.draft_rows] >= 0
    index = (
        on_device(offset[rows.draft_rows][kept], device),
        on_device(np.ascontiguousarray(rows.draft_tokens[kept]), device),
    )
    counts.index_put_(index, torch.ones_like(index[0], dtype=counts.dtype), accumulate=True)
    seen.index_put_(index, torch.ones_like(index[0], dtype=torch.bool))
    return counts, seen, offset


def _forbid(
    processed: Tensor, stops: list[tuple[int, int]], rows: SamplingRows, device: torch.device
) -> None:
    """Takes stop tokens out, unless a grammar then leaves nothing: it wins."""
    index = on_device(np.array(stops, np.int64).T.copy(), device)
    minus = torch.full((), float("-inf"), device=device)
    processed.index_put_((index[0], index[1]), minus)
    if rows.grammar_masks is None:
        return
    early = {row for row, _ in stops}
    guided = [offset for offset, row in enumerate(rows.grammar_rows.tolist()) if row in early]
    if not guided:
        return
    forbidden = on_device(forbidden_tokens(rows.grammar_masks[guided], processed.shape[1]), device)
    offsets = on_device(np.ascontiguousarray(rows.grammar_rows[guided]), device)
    under = processed.index_select(0, offsets)
    stuck = under.amax(-1, keepdim=True) == float("-inf")
    free = torch.zeros_like(under).masked_fill(forbidden, float("-inf"))
    processed.index_copy_(0, offsets, torch.where(stuck, free, under))
