"""Sampling in Triton draws the tokens that the torch sampler draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kernels.sampling.filters import apply_min_p, apply_top_k_top_p
from engine.kernels.sampling.noise import gumbel, row_keys
from engine.kernels.sampling.triton_sampling import RowOptions, compile_draw, draw, process

ROWS = 6


def sample(logits: torch.Tensor, options: RowOptions) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, whether any was allowed, and processed logits."""
    processed, _ = process(logits, options)
    return *draw(processed, options), processed


def keys() -> torch.Tensor:
    seeds = np.arange(ROWS, dtype=np.uint64) * np.uint64(0xFFFF_FFFF_FFFF) + np.uint64(5)
    return torch.from_numpy(row_keys(seeds, np.arange(ROWS) % 2, np.arange(ROWS) * 7))


def options(**changes: torch.Tensor) -> RowOptions:
    defaults = {
        "temperature": torch.ones(ROWS),
        "min_p": torch.zeros(ROWS),
        "top_k": torch.zeros(ROWS, dtype=torch.int32),
        "top_p": torch.ones(ROWS),
        "noise_keys": keys(),
    }
    return RowOptions(**{**defaults, **changes})


def logits(vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def expected_tokens(processed: torch.Tensor, chosen: RowOptions) -> torch.Tensor:
    warm = processed / torch.where(chosen.temperature > 0, chosen.temperature, 1.0)[:, None]
    filtered = apply_min_p(warm, chosen.min_p)
    filtered = apply_top_k_top_p(filtered, chosen.top_k.long(), chosen.top_p)
    drawn = (filtered.double() + gumbel(chosen.noise_keys, processed.shape[1])).argmax(-1)
    return torch.where(chosen.temperature > 0, drawn, processed.argmax(-1))


@pytest.mark.parametrize("vocab_size", [3, 1000, 5001])
def test_draws_are_those_of_the_torch_sampler(vocab_size: int) -> None:
    chosen = options(
        temperature=torch.tensor([0.0, 1.0, 0.7, 1.5, 1.0, 0.2]),
        min_p=torch.tensor([0.0, 0.0, 0.05, 0.0, 0.1, 0.0]),
        top_k=torch.tensor([5, 0, 3, 40, 0, 1], dtype=torch.int32),
        top_p=torch.tensor([0.5, 0.3, 1.0, 0.9, 0.95, 1.0]),
    )
    for seed in range(4):
        tokens, allowed, processed = sample(logits(vocab_size, seed), chosen)
        assert allowed.all()
        assert torch.equal(tokens, expected_tokens(processed, chosen))


def test_equal_logits_stay_together() -> None:
    flat = torch.zeros(ROWS, 50)
    chosen = options(top_k=torch.full((ROWS,), 2, dtype=torch.int32))
    tokens, _, _ = sample(flat, chosen)
    assert torch.equal(tokens, expected_tokens(flat, chosen))
    assert len(set(tokens.tolist())) > 1


def test_penalties_biases_and_masks_apply_to_their_rows_alone() -> None:
    vocab_size = 70
    plain = logits(vocab_size)
    counts = torch.zeros(2, vocab_size, dtype=torch.int32)
    counts[1, :5] = torch.tensor([1, 2, 0, 3, 1])
    seen = counts > 0
    seen[1, 20] = True
    biases = torch.zeros(1, vocab_size)
    biases[0, 7] = -100.0
    masks = torch.zeros(1, 3, dtype=torch.int32)
    masks[0, 0], masks[0, 2] = 1 << 9, 1 << 3  # tokens 9 and 67
    none = [-1] * ROWS
    _, _, processed = sample(
        plain,
        options(
            repetition=torch.full((ROWS,), 1.5),
            frequency=torch.full((ROWS,), 0.25),
            presence=torch.full((ROWS,), 0.5),
            count_row=torch.tensor([1, *none[1:]], dtype=torch.int32),
            output_counts=counts,
            seen=seen,
            bias_row=torch.tensor([-1, 0, *none[2:]], dtype=torch.int32),
            biases=biases,
            mask_row=torch.tensor([-1, -1, 0, *none[3:]], dtype=torch.int32),
            masks=masks,
        ),
    )
    row = plain[0]
    penalized = torch.where(seen[1], torch.where(row > 0, row / 1.5, row * 1.5), row)
    penalized = penalized - 0.25 * counts[1] - 0.5 * (counts[1] > 0)
    torch.testing.assert_close(processed[0], penalized)
    torch.testing.assert_close(processed[1], plain[1] + biases[0])
    assert processed[2].isfinite().nonzero()[:, 0].tolist() == [9, 67]
    assert torch.equal(processed[3:], plain[3:])


def test_a_row_where_nothing_is_allowed_says_so() -> None:
    some = logits(40)
    some[1] = float("-inf")
    _, allowed, _ = sample(some, options())
    assert allowed.tolist() == [True, False, True, True, True, True]


def test_draws_follow_the_distribution() -> None:
    rows, vocab_size = 600, 5
    row = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    seeds = np.arange(rows, dtype=np.uint64)
    chosen = RowOptions(
        temperature=torch.ones(rows),
        min_p=torch.zeros(rows),
        top_k=torch.zeros(rows, dtype=torch.int32),
        top_p=torch.ones(rows),
        noise_keys=torch.from_numpy(row_keys(seeds, np.zeros(rows, np.int64), np.zeros(rows, np.int64))),
    )
    tokens, _, _ = sample(row.repeat(rows, 1), chosen)
    found = torch.bincount(tokens, minlength=vocab_size).double()
    wanted = torch.softmax(row.double(), 0) * rows
    # 99.9 % quantile of chi-square with 4 degrees of freedom.
    assert float(((found - wanted) ** 2 / wanted).sum()) < 18.5


def test_every_combination_of_options_can_be_compiled_beforehand() -> None:
    compile_draw(70, torch.device("cpu"))


def test_logits_that_are_not_finite_are_told_apart_from_masks() -> None:
    some = logits(5001)
    some[1, 4999], some[3, 0] = float("nan"), float("inf")
    masks = torch.zeros(1, 157, dtype=torch.int32)
    masks[0, 0] = 1
    mask_row = torch.zeros(ROWS, dtype=torch.int32)
    processed, finite = process(some, options(mask_row=mask_row, masks=masks))
    assert finite.tolist() == [True, False, True, False, True, True]
    assert int((processed[0] > float("-inf")).sum()) == 1
    unchanged, _ = process(some, options())
    assert unchanged is some
