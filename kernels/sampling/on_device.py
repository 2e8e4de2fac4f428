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

_FLOATS = tuple(name for name in OPTIONS.names or () if OPTIONS[name] == np.float32)


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
    packed, width = _packed(rows, options, (count_row, mask_row))
    there = on_device(packed, device)
    asked: dict[str, Any] = dict(
        zip(_FLOATS, there[width : 4 * width].view(torch.float32).view(len(_FLOATS), width), strict=True)
    )
    top_k, count_rows, bias_rows, mask_rows = there[4 * width :].view(torch.int32).view(4, width)
    keys = there[:count] if rows.noise_keys is None else rows.noise_keys
    asked |= {"noise_keys": keys, "top_k": top_k, "filters": _filtered(options)}
    if penalized:
        asked |= {"count_row": count_rows, "output_counts": counts, "seen": seen}
    if biased:
        asked |= {"bias_row": bias_rows, "biases": table.biases.tensor}
    if masks is not None:
        asked |= {"mask_row": mask_rows, "masks": masks}
    return asked


def _packed(
    rows: SamplingRows, options: NDArray[np.void], places: tuple[NDArray[Any], NDArray[Any]]
) -> tuple[NDArray[np.int64], int]:
    """Keys, then the floats, then the whole numbers (top-k, and rows of counts, biases and masks); and the
    width of each in units of eight bytes. Each begins at a multiple of 16 bytes whatever the number of rows:
    kernels are compiled anew for pointers that do not. Keys are left out where the device has its own.
    """
    count = len(options)
    width = -(-count // 4) * 4
    packed = np.zeros(6 * width, np.int64)
    if rows.noise_keys is None:
        packed[:count] = row_keys(options["seed"].copy(), options["choice"].copy(), rows.positions)
    floats = packed[width : 4 * width].view(np.float32).reshape(len(_FLOATS), width)
    for place, name in enumerate(_FLOATS):
        floats[place, :count] = options[name]
    whole = packed[4 * width :].view(np.int32).reshape(4, width)
    count_row, mask_row = places
    for place, values in enumerate((options["top_k"], count_row, options["bias_row"], mask_row)):
        whole[place, :count] = values
    return packed, width


def _filtered(options: NDArray[np.void]) -> bool:
    """Whether any row asks for top-k or top-p."""
    return bool(((options["temperature"] > 0) & ((options["top_k"] > 0) | (options["top_p"] < 1))).any())


def with_drafts(
    table: Tables, rows: SamplingRows, options: NDArray[np.void], device: torch.device
) -> tuple[Tensor, Tensor, NDArray[np.int64]]:
    """Counts and occurrences of the penalized rows with their drafts, and each row's place there."""
    chosen = np.flatnonzero(options["count_row"] != NO_ROW)
    place = np.full(len(options), NO_ROW, np.int64)
    place[chosen] = np.arange(chosen.size)
    wide = on_device(options["count_row"][chosen], device)
    counts, seen = table.output_counts.tensor[wide], table.seen.tensor[wide]
    kept = place[rows.draft_rows] >= 0
    index = (
        on_device(place[rows.draft_rows][kept], device),
        on_device(np.ascontiguousarray(rows.draft_tokens[kept]), device),
    )
    counts.index_put_(index, torch.ones_like(index[0], dtype=counts.dtype), accumulate=True)
    seen.index_put_(index, torch.ones_like(index[0], dtype=torch.bool))
    return counts, seen, place


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
    guided = [place for place, row in enumerate(rows.grammar_rows.tolist()) if row in early]
    if not guided:
        return
    forbidden = on_device(forbidden_tokens(rows.grammar_masks[guided], processed.shape[1]), device)
    places = on_device(np.ascontiguousarray(rows.grammar_rows[guided]), device)
    under = processed.index_select(0, places)
    stuck = under.amax(-1, keepdim=True) == float("-inf")
    free = torch.zeros_like(under).masked_fill(forbidden, float("-inf"))
    processed.index_copy_(0, places, torch.where(stuck, free, under))
