"""The draw in torch: what GPUs without Triton and CPUs without native kernels compute with, and the reference
of both.

Shape letters: R rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling.filters import apply_min_p, apply_top_k_top_p
from kernels.sampling.noise import gumbel, row_keys
from kernels.sampling.on_device import DeviceDrawn, with_drafts
from kernels.sampling.rows import NO_ROW, Drawn, SamplingRows, Tables, early_stops, forbidden_tokens


def sample_by_torch(logits: Tensor, table: Tables, rows: SamplingRows) -> Drawn:
    """Draws one token per row of logits [R, V] (float32, left as it is)."""
    options = table.options[rows.slots]
    device = logits.device
    finite = torch.isfinite(logits).all(-1)
    masked = (
        torch.where(finite[:, None], logits, torch.zeros_like(logits)) if not bool(finite.all()) else logits
    )
    masked = _penalize(masked, table, rows, options)
    masked = _add_biases(masked, table, options)
    masked = _mask_stop_tokens(masked, table, rows)
    masked = _mask_grammar(masked, rows, options)
    allowed = torch.isfinite(masked.amax(-1))
    tokens = masked.argmax(-1)
    random = np.flatnonzero(options["temperature"] > 0)
    if random.size:
        everything = random.size == len(options)
        chosen = options if everything else options[random]
        index = torch.from_numpy(random).to(device)
        drawn = _draw(masked if everything else masked[index], chosen, rows.positions[random])
        tokens = drawn if everything else tokens.index_copy(0, index, drawn)
    return DeviceDrawn(tokens=tokens, finite=finite, allowed=allowed, processed=masked).fetched()


def _draw(logits: Tensor, options: NDArray[np.void], positions: NDArray[np.int64]) -> Tensor:
    device = logits.device
    logits = logits / _column(options, "temperature", device)[:, None]
    if (options["min_p"] > 0).any():
        logits = apply_min_p(logits, _column(options, "min_p", device))
    if (options["top_k"] > 0).any() or (options["top_p"] < 1).any():
        logits = apply_top_k_top_p(
            logits, _column(options, "top_k", device), _column(options, "top_p", device)
        )
    keys = row_keys(options["seed"].copy(), options["choice"].copy(), positions)
    noise = gumbel(torch.from_numpy(keys).to(device), logits.shape[1])
    return (logits.double() + noise).argmax(-1)


def _penalize(logits: Tensor, table: Tables, rows: SamplingRows, options: NDArray[np.void]) -> Tensor:
    chosen = np.flatnonzero(options["count_row"] != NO_ROW)
    if not chosen.size:
        return logits
    device = logits.device
    index = torch.from_numpy(chosen).to(device)
    counts, seen, _ = with_drafts(table, rows, options, device)
    some = options[chosen]
    values = logits[index]
    repetition = _column(some, "repetition_penalty", device)[:, None]
    values = torch.where(seen, torch.where(values > 0, values / repetition, values * repetition), values)
    values = values - counts * _column(some, "frequency_penalty", device)[:, None]
    values = values - (counts > 0) * _column(some, "presence_penalty", device)[:, None]
    return logits.index_copy(0, index, values)


def _add_biases(logits: Tensor, table: Tables, options: NDArray[np.void]) -> Tensor:
    chosen = np.flatnonzero(options["bias_row"] != NO_ROW)
    if not chosen.size:
        return logits
    index = torch.from_numpy(chosen).to(logits.device)
    biases = table.biases.tensor[torch.from_numpy(options["bias_row"][chosen]).to(logits.device)]
    return logits.index_copy(0, index, logits[index] + biases)


def _mask_stop_tokens(logits: Tensor, table: Tables, rows: SamplingRows) -> Tensor:
    pairs = early_stops(table, rows)
    if not pairs:
        return logits
    index = torch.tensor(pairs, device=logits.device)
    return logits.index_put((index[:, 0], index[:, 1]), torch.tensor(float("-inf"), device=logits.device))


def _mask_grammar(logits: Tensor, rows: SamplingRows, options: NDArray[np.void]) -> Tensor:
    if rows.grammar_masks is None or not rows.grammar_rows.size:
        return logits
    forbidden = torch.from_numpy(forbidden_tokens(rows.grammar_masks, logits.shape[1])).to(logits.device)
    index = torch.from_numpy(rows.grammar_rows).to(logits.device)
    under = logits[index]
    masked = under.masked_fill(forbidden, float("-inf"))
    # Where the grammar leaves only the end and min_tokens forbids it, the grammar wins.
    early = (rows.positions < options["min_tokens"])[rows.grammar_rows]
    stuck = (masked.amax(-1) == float("-inf")) & torch.from_numpy(early).to(logits.device)
    if bool(stuck.any()):
        masked[stuck] = torch.zeros_like(masked[stuck]).masked_fill(forbidden[stuck], float("-inf"))
    return logits.index_copy(0, index, masked)


def _column(options: NDArray[np.void], name: str, device: torch.device) -> Tensor:
    return torch.from_numpy(options[name].copy()).to(device)


def logprobs_by_torch(
    logits: Tensor, tokens: list[int], num_best: int, excluded: Tensor | None
) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """What `native.native_logprobs` reports."""
    normalized = torch.log_softmax(logits, dim=-1)
    chosen = normalized.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    eligible = normalized if excluded is None else normalized.masked_fill(excluded, float("-inf"))
    best = torch.topk(eligible, min(num_best, logits.shape[1]), dim=-1)
    values = [[value for value in row if value > float("-inf")] for row in best.values.tolist()]
    ids = [row[: len(left)] for row, left in zip(best.indices.tolist(), values, strict=True)]
    return chosen, ids, values
