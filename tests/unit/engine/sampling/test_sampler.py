"""What is drawn, and how often: exact distributions, filters, penalties, masks."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.table import SamplingTable, sample
from engine.types import SamplingParams
from kernels.sampling.noise import gumbel, row_keys
from kernels.sampling.reference import apply_min_p, apply_top_k_top_p, sample_by_torch
from kernels.sampling.rows import Drawn, SamplingRows

torch.set_num_threads(1)
CPU = torch.device("cpu")
V = 24
DRAWS = 20_000


def draw(
    logits: torch.Tensor,
    params: SamplingParams,
    *,
    num_draws: int = 1,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    first_position: int = 0,
    allowed: list[int] | None = None,
) -> Drawn:
    """Draws for output positions 0, 1, ... under the same logits [V]."""
    table = SamplingTable(len(logits), CPU)
    table.grow(1)
    table.put(0, params, 0, np.array(prompt or [], np.int64), np.array(output or [], np.int64))
    masks = None
    if allowed is not None:
        bits = np.zeros(-(-len(logits) // 32) * 32, np.uint8)
        bits[allowed] = 1
        masks = np.tile(np.packbits(bits, bitorder="little").view(np.int32), (num_draws, 1))
    rows = SamplingRows(
        slots=np.zeros(num_draws, np.int64),
        positions=first_position + np.arange(num_draws),
        grammar_rows=np.arange(num_draws) if allowed is not None else np.array([], np.int64),
        grammar_masks=masks,
    )
    return sample(logits.expand(num_draws, -1), table, rows)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standardised chi-square statistic over the tokens that can occur; about normal."""
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    statistic = float((((counts - expected) ** 2)[possible] / expected[possible]).sum())
    freedom = int(possible.sum()) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def top_k_top_p(probabilities: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """The definition, token by token."""
    order = np.argsort(-probabilities)
    kept = order[: top_k or len(order)]
    share = probabilities[kept] / probabilities[kept].sum()
    before = np.concatenate(([0], np.cumsum(share)[:-1]))
    kept = kept[before < top_p]
    result = np.zeros_like(probabilities)
    result[kept] = probabilities[kept]
    return result / result.sum()


CASES: dict[str, tuple[SamplingParams, Callable[[np.ndarray], np.ndarray]]] = {
    "plain": (SamplingParams(seed=1), lambda p: p),
    "hot": (SamplingParams(temperature=1.7, seed=2), lambda p: p ** (1 / 1.7)),
    "cold": (SamplingParams(temperature=0.4, seed=3), lambda p: p ** (1 / 0.4)),
    "top-k": (SamplingParams(top_k=5, seed=4), lambda p: top_k_top_p(p, 5, 1.0)),
    "top-p": (SamplingParams(top_p=0.7, seed=5), lambda p: top_k_top_p(p, 0, 0.7)),
    "both": (SamplingParams(top_k=9, top_p=0.8, seed=6), lambda p: top_k_top_p(p, 9, 0.8)),
    "min-p": (SamplingParams(min_p=0.2, seed=7), lambda p: np.where(p >= 0.2 * p.max(), p, 0)),
}


@pytest.mark.parametrize("name", CASES)
def test_distribution_is_exact(name: str) -> None:
    params, shape = CASES[name]
    logits = 1.5 * torch.randn(V, generator=torch.Generator().manual_seed(11))
    expected = shape(torch.softmax(logits.double(), -1).numpy())
    counts = np.bincount(draw(logits, params, num_draws=DRAWS).tokens, minlength=V)
    assert abs(chi_square(counts, DRAWS * expected / expected.sum())) < 5


def test_successive_draws_are_independent() -> None:
    """Pairs of neighbouring positions, and of neighbouring seeds, fill the square evenly."""
    logits = torch.zeros(6)
    along = draw(logits, SamplingParams(seed=9), num_draws=DRAWS).tokens
    pairs = np.bincount(along[:-1] * 6 + along[1:], minlength=36)
    assert abs(chi_square(pairs, np.full(36, (DRAWS - 1) / 36))) < 5
    seeds = np.arange(DRAWS).astype(np.uint64)
    zeros = np.zeros(DRAWS, np.int64)
    across = gumbel(torch.from_numpy(row_keys(seeds, zeros, zeros)), 6).argmax(-1).numpy()
    pairs = np.bincount(across[:-1] * 6 + across[1:], minlength=36)
    assert abs(chi_square(pairs, np.full(36, (DRAWS - 1) / 36))) < 5


def test_gumbel_noise_has_its_moments() -> None:
    noise = gumbel(torch.tensor([1, -(2**63), 2**63 - 1]), 50_000)
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.05)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.sampled_from([2, 24, 700]),
    top_k=st.sampled_from([0, 1, 3, 600, 5000]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]),
    spread=st.sampled_from([0.01, 1.0, 8.0]),
)
def test_filters_keep_what_the_definition_keeps(
    seed: int, size: int, top_k: int, top_p: float, spread: float
) -> None:
    """Also where the kept tokens are more than the candidates looked at first."""
    logits = spread * torch.randn(1, size, generator=torch.Generator().manual_seed(seed))
    kept = apply_top_k_top_p(logits, torch.tensor([top_k]), torch.tensor([top_p])).isfinite()[0].numpy()
    probabilities = torch.softmax(logits[0].double(), -1).numpy()
    expected = top_k_top_p(probabilities, min(top_k, size), top_p) > 0
    # At the edge of the mass, float32 top_p and rounding may move the border by one token, or by several that
    # together weigh nothing beside the whole in float64.
    differing = kept != expected
    assert differing.sum() <= 1 or probabilities[differing].sum() < 1e-12
    assert kept[int(logits.argmax())]


def test_equal_logits_stay_together() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    kept = apply_top_k_top_p(logits, torch.tensor([2]), torch.tensor([1.0]))
    assert kept[0].isfinite().tolist() == [False, True, True, True, False]
    assert apply_min_p(logits, torch.tensor([0.9]))[0].isfinite().tolist() == [False, True, True, True, False]


def test_penalties_follow_their_formulas() -> None:
    """repetition looks at prompt and output, the others at the output alone."""
    logits = torch.tensor([3.0, 2.9, -1.0, 2.8])
    prompt, output = [0], [1, 1, 2]

    def best(**options: float) -> int:
        params = SamplingParams(temperature=0.0, **options)
        return int(draw(logits, params, prompt=prompt, output=output).tokens[0])

    assert best() == 0
    assert best(repetition_penalty=1.1) == 3
    assert best(presence_penalty=1.0) == 0
    assert best(repetition_penalty=1.5, presence_penalty=-10.0) == 1
    assert best(presence_penalty=-0.2) == 1
    # 2.9 + 2 * 0.06 > 3.0, while presence would add 0.06 once.
    assert best(frequency_penalty=-0.06) == 1
    assert best(presence_penalty=-0.06) == 0


@pytest.mark.parametrize("temperature", [1e-5, 1e-7, 1e-38, 5e-324])
def test_almost_no_temperature_is_greedy(temperature: float) -> None:
    """Also where logits divided by it are infinite."""
    logits = torch.tensor([3.0, 5.0, 4.9, -2.0])
    drawn = draw(logits, SamplingParams(temperature=temperature, seed=3), num_draws=50)
    assert drawn.tokens.tolist() == [1] * 50


@pytest.mark.parametrize(
    "other",
    [
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.0, logit_bias={5: 100.0}),
        SamplingParams(temperature=0.0, frequency_penalty=1.0),
        SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(7,)),
    ],
)
def test_plain_rows_and_others_keep_their_draws_together(other: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, V, generator=generator)
    logits[:, 7] += 10
    table = SamplingTable(V, CPU)
    table.grow(2)
    none = np.array([], np.int64)
    table.put(0, SamplingParams(temperature=0.0), 0, none, none)
    table.put(1, other, 0, none, np.array([7], np.int64))
    assert table.plain.tolist() == [True, False]

    def tokens(slots: list[int]) -> list[int]:
        rows = SamplingRows(slots=np.array(slots, np.int64), positions=np.ones(len(slots), np.int64))
        return sample(logits[slots], table, rows).tokens.tolist()

    assert tokens([0, 1]) == [*tokens([0]), *tokens([1])]
    assert tokens([0]) == [7]
    # The slot of a sequence that wanted more serves one that wants nothing, and the other way about.
    table.drop(1)
    table.put(1, SamplingParams(temperature=0.0), 0, none, none)
    assert table.plain.tolist() == [True, True]
    assert tokens([1]) == [7]


def test_counts_follow_the_output() -> None:
    table = SamplingTable(4, CPU)
    table.grow(2)
    for slot in (0, 1):
        table.put(slot, SamplingParams(frequency_penalty=1.0), 0, np.array([2]), np.array([], np.int64))
    table.append(np.array([0, 0, 1]), np.array([3, 3, 1]))
    rows = table.options["count_row"]
    assert table.output_counts.rows[rows[0]].tolist() == [0, 0, 0, 2]
    assert table.output_counts.rows[rows[1]].tolist() == [0, 1, 0, 0]
    table.drop(0)
    table.put(0, SamplingParams(presence_penalty=1.0), 0, np.array([1]), np.array([], np.int64))
    row = table.options["count_row"][0]
    assert table.output_counts.rows[row].tolist() == [0, 0, 0, 0]
    assert table.seen.rows[row].tolist() == [False, True, False, False]


def test_drafts_count_for_the_rows_after_them() -> None:
    """Row i is drawn as if drafts 0..i-1 had been emitted."""
    table = SamplingTable(3, CPU)
    table.grow(1)
    table.put(
        0, SamplingParams(temperature=0.0, presence_penalty=5.0), 0, np.array([0]), np.array([], np.int64)
    )
    rows = SamplingRows(
        slots=np.zeros(3, np.int64),
        positions=np.arange(3),
        draft_rows=np.array([1, 2, 2]),
        draft_tokens=np.array([0, 0, 1]),
    )
    logits = torch.tensor([2.0, 1.0, 0.0]).expand(3, -1)
    assert sample(logits, table, rows).tokens.tolist() == [0, 1, 2]
    assert table.output_counts.rows[table.options["count_row"][0]].tolist() == [0, 0, 0]


def test_bias_allowed_tokens_and_min_tokens() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])

    def best(position: int = 0, **options: object) -> int:
        params = SamplingParams(temperature=0.0, **options)
        return int(draw(logits, params, first_position=position).tokens[0])

    assert best(logit_bias={3: 5.0}) == 3
    assert best(logit_bias={0: -100.0}) == 1
    assert best(allowed_token_ids=(2, 3)) == 2
    assert best(allowed_token_ids=(2, 3), logit_bias={3: 2.0}) == 3
    assert best(min_tokens=2, stop_token_ids=(0, 1)) == 2
    assert best(position=2, min_tokens=2, stop_token_ids=(0, 1)) == 0


def test_grammar_masks_bind_and_beat_min_tokens() -> None:
    logits = torch.zeros(40)
    for params in (SamplingParams(temperature=0.0), SamplingParams(seed=3)):
        drawn = draw(logits, params, allowed=[35, 7], num_draws=50)
        assert set(drawn.tokens.tolist()) <= {7, 35}
    ends = SamplingParams(temperature=0.0, min_tokens=5, stop_token_ids=(35,))
    assert draw(logits, ends, allowed=[35]).tokens.tolist() == [35]
    assert draw(logits, ends, allowed=[35, 7]).tokens.tolist() == [7]
    contradiction = SamplingParams(temperature=0.0, allowed_token_ids=(1,))
    assert draw(logits, contradiction, allowed=[35]).allowed.tolist() == [False]


def test_one_bad_row_leaves_the_others_alone() -> None:
    table = SamplingTable(V, CPU)
    table.grow(1)
    table.put(0, SamplingParams(seed=4), 0, np.array([0]), np.array([], np.int64))
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(0))
    rows = SamplingRows(slots=np.zeros(3, np.int64), positions=np.arange(3))
    clean = sample(logits, table, rows)
    for poison in (float("nan"), float("inf")):
        spoiled = logits.clone()
        spoiled[1, 3] = poison
        drawn = sample(spoiled, table, rows)
        assert drawn.finite.tolist() == [True, False, True]
        assert drawn.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()


def test_one_copy_brings_the_outcome_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    table = SamplingTable(V, CPU)
    table.grow(1)
    table.put(0, SamplingParams(temperature=0.0), 0, np.array([0]), np.array([], np.int64))
    rows = SamplingRows(slots=np.zeros(2, np.int64), positions=np.arange(2))
    copies: list[torch.Size] = []
    plain = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copies.append(tensor.shape) or plain(tensor))
    logits = torch.zeros(2, V)
    logits[0, 5] = 1.0
    logits[1, 7] = float("nan")
    drawn = sample_by_torch(logits, table, rows)
    assert copies == [(3, 2)]
    assert drawn.tokens[0] == 5
    assert drawn.finite.tolist() == [True, False]
    assert drawn.allowed.tolist() == [True, True]
    assert drawn.finite.dtype == drawn.allowed.dtype == np.bool_
