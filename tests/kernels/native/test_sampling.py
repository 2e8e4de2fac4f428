"""The native sampler draws the very tokens of the torch sampler, and reports the same log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.sampling.table import SamplingTable
from engine.types import SamplingParams
from kernels.native.library import NativeLibrary
from kernels.sampling.native import NativeDraws, native_logprobs
from kernels.sampling.reference import logprobs_by_torch, sample_by_torch
from kernels.sampling.rows import SamplingRows

CPU = torch.device("cpu")
OPTIONS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.0, top_k=1),
    SamplingParams(top_k=5),
    SamplingParams(top_k=40, top_p=0.8),
    SamplingParams(top_k=10_000, top_p=0.9),
    SamplingParams(top_p=0.95),
    SamplingParams(top_p=0.01),
    SamplingParams(min_p=0.2),
    SamplingParams(min_p=0.05, top_p=0.7, top_k=30),
    SamplingParams(temperature=1.3, presence_penalty=0.7, frequency_penalty=0.4),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=-0.5),
    SamplingParams(logit_bias={0: 8.0, 3: -100.0}),
    SamplingParams(temperature=0.0, allowed_token_ids=(1, 2, 4)),
    SamplingParams(min_tokens=5, stop_token_ids=(1, 2)),
]


def table_of(vocab_size: int, seed: int) -> SamplingTable:
    """One slot per entry of OPTIONS, with prompts and outputs of their own."""
    table, random = SamplingTable(vocab_size, CPU), np.random.default_rng(seed)
    table.grow(len(OPTIONS))
    for slot, params in enumerate(OPTIONS):
        ids = random.integers(0, vocab_size, 40)
        named = SamplingParams(**{**{f: getattr(params, f) for f in params.__struct_fields__}, "seed": slot})
        table.put(slot, named, slot % 3, ids[:30], ids[30:])
    return table


def rows_of(slots: np.ndarray, vocab_size: int, seed: int, *, guided: bool) -> SamplingRows:
    random = np.random.default_rng(seed)
    count = len(slots)
    draft_rows = np.sort(random.integers(0, count, 9))
    grammar_rows = np.flatnonzero(random.random(count) < 0.5) if guided else np.array([], np.int64)
    words = -(-vocab_size // 32)
    masks = random.integers(-(2**31), 2**31, (len(grammar_rows), words)).astype(np.int32)
    masks[::3, 1:] = 0
    masks[:, 0] |= 7
    return SamplingRows(
        slots=slots,
        positions=random.integers(0, 9, count),
        draft_rows=draft_rows,
        draft_tokens=random.integers(0, vocab_size, 9),
        grammar_rows=grammar_rows,
        grammar_masks=masks if guided else None,
    )


@pytest.mark.parametrize("vocab_size", [5, 24, 33, 1000, 32_001])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
@pytest.mark.parametrize("guided", [False, True])
def test_same_tokens_as_torch(native: NativeLibrary, vocab_size: int, spread: float, guided: bool) -> None:
    table = table_of(vocab_size, seed=vocab_size)
    repeats = 2 if vocab_size > 1000 else 12
    slots = np.tile(np.arange(len(OPTIONS)), repeats)
    logits = spread * torch.randn(len(slots), vocab_size, generator=torch.Generator().manual_seed(3))
    rows = rows_of(slots, vocab_size, seed=5, guided=guided)
    expected = sample_by_torch(logits, table, rows)
    draws = NativeDraws(native)
    tokens, finite, allowed, processed = draws.draw(logits, table, rows)
    differing = np.flatnonzero(tokens != expected.tokens)
    # The border of top-p is where two sums of rounded numbers meet; elsewhere nothing may differ.
    assert all(0 < OPTIONS[slots[row]].top_p < 1 for row in differing)
    assert len(differing) <= len(slots) // 50
    assert finite.all()
    assert np.array_equal(allowed, expected.allowed)
    torch.testing.assert_close(torch.from_numpy(processed), expected.processed, atol=1e-5, rtol=1e-6)
    alone = [
        draws.draw(logits[row : row + 1], table, _one_row(rows, row))[0][0] for row in range(0, len(slots), 7)
    ]
    assert alone == tokens[::7].tolist()


def _one_row(rows: SamplingRows, row: int) -> SamplingRows:
    drafts = rows.draft_rows == row
    masks = rows.grammar_masks
    mine = np.flatnonzero(rows.grammar_rows == row)
    return SamplingRows(
        slots=rows.slots[row : row + 1],
        positions=rows.positions[row : row + 1],
        draft_rows=np.zeros(int(drafts.sum()), np.int64),
        draft_tokens=rows.draft_tokens[drafts],
        grammar_rows=np.zeros(len(mine), np.int64),
        grammar_masks=None if masks is None or not len(mine) else masks[mine],
    )


def test_equal_logits_and_poison(native: NativeLibrary) -> None:
    table = SamplingTable(40, CPU)
    table.grow(3)
    empty = np.array([], np.int64)
    for slot, params in enumerate(
        (SamplingParams(temperature=0.0), SamplingParams(top_k=3, seed=1), SamplingParams(top_p=0.5, seed=2))
    ):
        table.put(slot, params, 0, empty, empty)
    rows = SamplingRows(slots=np.array([0, 1, 2, 0, 1, 2]), positions=np.arange(6))
    logits = torch.zeros(6, 40)
    logits[:, 20:] = -1.0
    logits[3, 0] = float("nan")
    logits[4, 39] = float("inf")
    tokens, finite, _, processed = NativeDraws(native).draw(logits, table, rows)
    assert finite.tolist() == [True, True, True, False, False, True]
    expected = sample_by_torch(logits, table, rows)
    assert tokens[finite].tolist() == expected.tokens[finite].tolist()
    assert processed.ctypes.data == logits.data_ptr(), "nothing was changed, so nothing need be copied"


@pytest.mark.parametrize("vocab_size", [1, 17, 1000, 32_001])
@pytest.mark.parametrize("num_best", [0, 1, 5, 20])
@pytest.mark.parametrize("some_excluded", [False, True])
def test_log_probabilities(
    native: NativeLibrary, vocab_size: int, num_best: int, some_excluded: bool
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 5 * torch.randn(4, vocab_size, generator=generator)
    tokens = [vocab_size - 1, 0, vocab_size // 2, 0]
    excluded = torch.rand(4, vocab_size, generator=generator) < 0.9 if some_excluded else None
    found = native_logprobs(native, logits, tokens, num_best, excluded)
    expected = logprobs_by_torch(logits, tokens, num_best, excluded)
    assert found[0] == pytest.approx(expected[0], abs=2e-5)
    assert found[1] == expected[1]
    for left, right in zip(found[2], expected[2], strict=True):
        assert left == pytest.approx(right, abs=2e-5)
