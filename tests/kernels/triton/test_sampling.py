"""Sampling in Triton draws the tokens that the torch sampler draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from engine.sampling.table import SamplingTable
from engine.types import SamplingParams
from kernels.sampling import triton_filters
from kernels.sampling.native import NativeDraws, sampling_library
from kernels.sampling.noise import row_keys
from kernels.sampling.on_device import carried, sample_on_device
from kernels.sampling.reference import apply_min_p, apply_top_k_top_p, sample_by_torch
from kernels.sampling.rows import SamplingRows
from kernels.sampling.triton_filters import borders
from kernels.sampling.triton_sampling import RowOptions, compile_draw, draw, process
from tests.kernels.triton.options import ROWS, filtered_and_drawn, options


def sample(logits: torch.Tensor, options: RowOptions) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, whether any was allowed, and processed logits."""
    processed = process(logits, options)
    tokens, _, allowed = draw(processed, options)
    return tokens, allowed != 0, processed.logits


def logits(vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def expected_tokens(processed: torch.Tensor, chosen: RowOptions) -> torch.Tensor:
    return filtered_and_drawn(processed, chosen)[1]


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
            repetition_penalty=torch.full((ROWS,), 1.5),
            frequency_penalty=torch.full((ROWS,), 0.25),
            presence_penalty=torch.full((ROWS,), 0.5),
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


def drawn_often(row: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """How often each token of a row [V] is drawn with NUM_SEEDS seeds [V]: by torch, whose tokens are
    those of the kernels for the first seeds.
    """

    def asked(rows: int) -> RowOptions:
        zeros = np.zeros(rows, np.int64)
        return RowOptions(
            temperature=torch.full((rows,), temperature),
            min_p=torch.zeros(rows),
            top_k=torch.full((rows,), top_k, dtype=torch.int32),
            top_p=torch.full((rows,), top_p),
            noise_keys=torch.from_numpy(row_keys(np.arange(rows, dtype=np.uint64), zeros, zeros)),
        )

    tokens = expected_tokens(row.repeat(NUM_SEEDS, 1), asked(NUM_SEEDS))
    few = 32
    found, _, _ = sample(row.repeat(few, 1), asked(few))
    assert torch.equal(found, tokens[:few])
    return torch.bincount(tokens, minlength=row.numel()).double()


NUM_SEEDS = 20_000


def test_draws_follow_the_distribution() -> None:
    row = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    found = drawn_often(row, 1.0, 0, 1.0)
    wanted = torch.softmax(row.double(), 0) * NUM_SEEDS
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
    asked = options(mask_row=mask_row, masks=masks)
    processed = process(some, asked)
    tokens, finite, _ = draw(processed, asked)
    assert finite.tolist() == [True, False, True, False, True, True]
    assert tokens.tolist() == [0] * ROWS
    assert int((processed.logits[0] > float("-inf")).sum()) == 1
    assert process(some, options()).logits is some


def drawable(warm: torch.Tensor) -> torch.Tensor:
    """Noise lifts a logit over the largest from so far below and no further."""
    return warm >= warm.amax(-1, keepdim=True) - 41.5


def kept_by_torch(warm: torch.Tensor, chosen: RowOptions) -> torch.Tensor:
    """Which tokens the reference leaves of logits over the temperature [R, V], of those that can be drawn."""
    filtered = apply_top_k_top_p(apply_min_p(warm, chosen.min_p), chosen.top_k.long(), chosen.top_p)
    return filtered.isfinite() & drawable(warm)


def kept(warm: torch.Tensor, chosen: RowOptions) -> torch.Tensor:
    """The same, of the kernels."""
    by_min_p = warm.amax(-1) + torch.log(chosen.min_p)
    filters = (chosen.temperature, chosen.min_p, chosen.top_k, chosen.top_p)
    lowest = torch.maximum(borders(process(warm, chosen), *filters), by_min_p)
    return (warm >= lowest[:, None]) & drawable(warm)


FILTERS = [
    *({"top_k": number} for number in (1, 2, 50, 4500, 100_000)),
    *({"top_p": share} for share in (1e-9, 0.5, 0.9, 0.999_9)),
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 4500, "top_p": 0.3},
    {"top_k": 7, "top_p": 0.95, "min_p": 0.1},
    {"top_p": 0.8, "min_p": 0.02},
    {"min_p": 0.3},
]


def rows_like(vocab_size: int) -> dict[str, torch.Tensor]:
    """Rows [V] in which a border is easy to miss."""
    bell = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    place = torch.arange(vocab_size)
    few = torch.full((vocab_size,), float("-inf"))
    few[:: max(1, vocab_size // 5)] = 1.0 + bell[:: max(1, vocab_size // 5)]
    return {
        "bell": 3 * bell,
        "narrow": 1e-4 * bell,
        "narrow, far from zero": 300.0 + 1e-4 * bell,
        "equal": torch.full((vocab_size,), -7.25),
        "one of them huge": torch.where(place == vocab_size // 2, 200.0, bell),
        "one of them tiny": torch.where(place == vocab_size // 2, -1e30, 1e-3 * bell),
        "few values, many ties": (2 * bell).round(),
        "zeros of both signs": torch.where(bell > 0, torch.zeros_like(bell), -torch.zeros_like(bell)),
        "few allowed": few,
        "wide": 1e4 * bell,
        "peaked": torch.where(
            torch.arange(vocab_size) < 30, 12 - torch.arange(vocab_size) * 0.4, 2 * bell - 8
        ),
    }


@pytest.mark.parametrize(("vocab_size", "capacity"), [(1, 8192), (33, 16), (9001, 8192), (9001, 16)])
@pytest.mark.parametrize("kind", rows_like(8))
def test_exactly_those_stay_that_the_torch_filters_leave(
    kind: str, vocab_size: int, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where more logits are near the border than the list has room for."""
    monkeypatch.setattr(triton_filters, "CAPACITY", tl.constexpr(capacity))
    warm = rows_like(vocab_size)[kind].repeat(len(FILTERS), 1)
    chosen = RowOptions(
        temperature=torch.ones(len(FILTERS)),
        min_p=torch.tensor([each.get("min_p", 0.0) for each in FILTERS]),
        top_k=torch.tensor([each.get("top_k", 0) for each in FILTERS], dtype=torch.int32),
        top_p=torch.tensor([each.get("top_p", 1.0) for each in FILTERS]),
        noise_keys=torch.zeros(len(FILTERS), dtype=torch.int64),
    )
    differing = (kept(warm, chosen) != kept_by_torch(warm, chosen)).sum(1)
    assert differing.tolist() == [0] * len(FILTERS)


VOCAB = 9001
ASKED = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=50),
    SamplingParams(temperature=0.7, top_p=0.95),
    SamplingParams(temperature=1.3, top_k=7),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, min_p=0.05),
    SamplingParams(temperature=0.9, top_p=0.4, frequency_penalty=0.5),
    SamplingParams(temperature=0.7, top_k=50, min_tokens=9, stop_token_ids=(4, 17)),
)


def table_and_rows(count: int) -> tuple[SamplingTable, SamplingRows]:
    """Rows that ask for each of ASKED in turn, each with a seed and a position of its own."""
    table = SamplingTable(VOCAB, torch.device("cpu"))
    table.grow(count)
    for slot in range(count):
        asked = ASKED[slot % len(ASKED)]
        named = {name: getattr(asked, name) for name in asked.__struct_fields__} | {"seed": 31 * slot}
        table.put(slot, SamplingParams(**named), slot % 3, np.arange(5), np.arange(3))
    return table, SamplingRows(slots=np.arange(count), positions=np.arange(count) % 6)


def test_tokens_are_those_of_torch_and_of_the_native_sampler_for_the_same_seeds() -> None:
    count = 2 * len(ASKED)
    table, rows = table_and_rows(count)
    logits = 2 * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(1))
    found = sample_on_device(logits, table, rows).fetched()
    assert found.tokens.tolist() == sample_by_torch(logits, table, rows).tokens.tolist()
    assert found.finite.all()
    assert found.allowed.all()
    library = sampling_library()
    if library is not None:
        assert found.tokens.tolist() == NativeDraws(library).draw(logits, table, rows)[0].tolist()


@pytest.mark.parametrize("num_columns", [1, 6, 7])
@pytest.mark.parametrize("count", [1, 4, 5])
def test_any_number_of_options_goes_to_the_device_by_name(num_columns: int, count: int) -> None:
    table, rows = table_and_rows(count)
    values = np.arange(count) + 0.5
    columns: dict[str, Any] = {
        str(number): (values + number).astype(np.float32 if number % 2 else np.int64)
        for number in range(num_columns)
    }
    found = carried(rows, table.options[rows.slots], columns, torch.device("cpu"))
    assert set(found) == {*columns, "noise_keys"}
    for name, wanted in columns.items():
        assert found[name][:count].tolist() == wanted.tolist()
        # Kernels are compiled anew for pointers that lie otherwise.
        assert (found[name].data_ptr() - found["noise_keys"].data_ptr()) % 16 == 0


def test_a_row_draws_the_same_token_alone_as_in_a_batch() -> None:
    count = len(ASKED)
    table, rows = table_and_rows(count)
    logits = 2 * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(2))
    together = sample_on_device(logits, table, rows).packed()
    for row in range(count):
        own = SamplingRows(slots=rows.slots[row : row + 1], positions=rows.positions[row : row + 1])
        assert torch.equal(sample_on_device(logits[[row]], table, own).packed()[:, 0], together[:, row])


def test_filtered_draws_follow_the_distribution_of_what_stays() -> None:
    row = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, 1.5, -4.0, 0.25])
    drawn = drawn_often(row, 0.7, 5, 0.93)
    # The five best hold 0.45, 0.22, 0.11, 0.05 and 0.04 of all: four have 0.93 of what the five have.
    stays = [3, 5, 0, 4]
    found = drawn[stays]
    assert found.sum() == NUM_SEEDS
    wanted = torch.softmax(row[stays].double() / 0.7, 0) * NUM_SEEDS
    # 99.9 % quantile of chi-square with 3 degrees of freedom.
    assert float(((found - wanted) ** 2 / wanted).sum()) < 16.3


def test_poison_in_a_row_stays_there_and_draws_no_token_that_does_not_exist() -> None:
    some = logits(5001)
    some[0] = float("nan")
    some[1, 4096:] = float("nan")
    some[2, 17] = float("inf")
    some[3] = float("-inf")
    chosen = options(top_k=torch.full((ROWS,), 50, dtype=torch.int32), top_p=torch.tensor([0.9] * 5 + [1.0]))
    tokens, finite, _ = draw(process(some, chosen), chosen)
    assert finite.tolist() == [0, 0, 0, 0, 1, 1]
    assert tokens[:4].tolist() == [0, 0, 0, 0]
    clean, _, _ = draw(process(logits(5001), chosen), chosen)
    assert torch.equal(tokens[4:], clean[4:])


def test_a_draw_launches_the_same_over_any_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a captured graph repeats: grids and shapes depend on the numbers of rows and tokens alone."""
    launched: list[tuple[object, ...]] = []
    plain = interpreter.GridExecutor.__call__

    def noting(self: interpreter.GridExecutor, *given: object, **named: object) -> object:
        shapes = [each.shape for each in given if isinstance(each, torch.Tensor)]
        launched.append((self.fn.__name__, self.grid, shapes))
        return plain(self, *given, **named)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", noting)
    chosen = options(top_k=torch.tensor([0, 1, 50, 0, 3, 9], dtype=torch.int32))
    found = []
    for some in (logits(5001), torch.zeros(ROWS, 5001), torch.full((ROWS, 5001), float("nan"))):
        launched.clear()
        draw(process(some, chosen), chosen)
        found.append(list(launched))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 8
    launched.clear()
    draw(process(some, chosen), replace(chosen, filters=False))
    assert len(launched) == 3, "what no row asks for is not launched"
