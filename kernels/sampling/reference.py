"""The draw in torch: what GPUs without Triton and CPUs without native kernels compute with, and the reference
of both.

Shape letters: R rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling.noise import gumbel, row_keys
from kernels.sampling.on_device import DeviceDrawn, with_drafts
from kernels.sampling.rows import NO_ROW, Drawn, SamplingRows, Tables, early_stops, forbidden_tokens

# The best so many tokens usually hold top_p of the mass; only when they do not is the whole row sorted.
CANDIDATES = 512


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


# top-k, top-p and min-p keep every token at or above a threshold, so that equal logits stay or go together
# and the result does not depend on the order of a sort.


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Drops tokens less likely than min_p [R] times the most likely one. logits [R, V] -> [R, V]."""
    threshold = logits.amax(-1, keepdim=True) + torch.log(min_p)[:, None]
    return logits.masked_fill(logits < threshold, float("-inf"))


def apply_top_k_top_p(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the top_k [R] best tokens (0 keeps all), then of these the fewest that hold top_p [R] of the
    mass.
    """
    vocab_size = logits.shape[1]
    keep = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size)
    num_candidates = min(vocab_size, max(CANDIDATES, int(torch.where(top_k > 0, keep, 0).max())))
    threshold, complete = _thresholds(logits, keep, top_p, num_candidates)
    if not bool(complete.all()):
        rows = (~complete).nonzero()[:, 0]
        threshold[rows] = _thresholds(logits[rows], keep[rows], top_p[rows], vocab_size)[0]
    return logits.masked_fill(logits < threshold[:, None], float("-inf"))


def _thresholds(logits: Tensor, keep: Tensor, top_p: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """Smallest logit that stays [R], and whether the candidates sufficed to know it [R]."""
    best = torch.topk(logits, num_candidates, dim=-1).values  # [R, candidates], best first
    rank = torch.arange(num_candidates, device=logits.device)
    inside = rank < keep[:, None]
    # With all tokens kept, the mass is that of the whole row; else that of the kept ones.
    whole = torch.logsumexp(logits.double(), -1)
    kept = torch.logsumexp(best.double().masked_fill(~inside, float("-inf")), -1)
    total = torch.where(keep >= logits.shape[1], whole, kept)
    mass = torch.exp(best.double() - total[:, None]).masked_fill(~inside, 0.0).cumsum(-1)
    # A token stays while the mass before it is below top_p; the first always does.
    before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=-1)
    stays = inside & ((before < top_p.double()[:, None]) | (top_p >= 1.0)[:, None])
    stays[:, 0] = True
    last = stays.sum(-1) - 1
    threshold = best.gather(1, last[:, None])[:, 0]
    unlimited = (keep >= logits.shape[1]) & (top_p >= 1.0)
    threshold = threshold.masked_fill(unlimited, float("-inf"))
    enough = (mass[:, -1] >= top_p) | (keep <= num_candidates) | unlimited
    return threshold, enough
