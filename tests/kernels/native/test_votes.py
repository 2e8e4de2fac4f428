"""What queries pay to each key, as native attention adds it up, against the weights of the formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kernels.attention.native import NativeAttention
from kernels.attention.native_ops import VOTE
from kernels.attention.ragged import RaggedBatch
from kernels.native.library import NativeLibrary
from tests.kernels.attention import Span, Step, draw
from tests.kernels.native.conftest import PRODUCT_LEVELS
from tests.kernels.native.test_attention import TOLERANCES, Make

# Of each sequence its first voter, where the voters end, and the positions that are voted for; None: nobody.
Voters = Sequence[tuple[int, int, int] | None]


@pytest.fixture
def attention(product_level: NativeLibrary) -> Make:
    """The back end at a level, on two threads."""
    return partial(NativeAttention, library=product_level, num_threads=2)


class Voting:
    """A back end whose steps' queries vote."""

    def __init__(self, backend: NativeAttention, sums: list[NDArray[np.int64]], votes: NDArray[Any]) -> None:
        self._backend, self.sums, self._votes = backend, sums, votes

    def plan(self, batch: RaggedBatch, device: torch.device) -> Any:
        return self._backend.plan(replace(batch, votes=self._votes), device)

    def run(self, *given: Any) -> torch.Tensor:
        return self._backend.run(*given)


def voted(
    make: Make, step: Step, voters: Voters, sums: list[NDArray[np.int64]] | None = None
) -> tuple[torch.Tensor, list[NDArray[np.int64]]]:
    """What attention gives, and the sums [K, F] of each sequence, beside those that were there."""
    sizes = [0 if each is None else each[2] for each in voters]
    sums = sums or [np.zeros((step.heads[1], size), np.int64) for size in sizes]
    votes = np.zeros((len(voters), 4), np.int64)
    for row, (each, its) in enumerate(zip(voters, sums, strict=True)):
        if each is not None:
            votes[row] = its.ctypes.data, *each
    return step.run(lambda **heads: Voting(make(**heads), sums, votes)), sums


def paid(step: Step, which: int, voters: tuple[int, int, int]) -> torch.Tensor:
    """The same of one sequence by the formula."""
    first, end, size = voters
    length, count = step.lengths[which], step.new[which]
    blocks = torch.from_numpy(step.tables[which : which + 1, : -(-length // step.block_size)])
    keys = step.cache.gather(blocks)[0][0, :, :length].repeat_interleave(step.heads[0] // step.heads[1], 0)
    q = step.q[step.rows((which, length - count, length))].float() * step.options.scale
    scores = torch.einsum("qhd,hld->hql", q, keys)
    if step.options.soft_cap is not None:
        scores = step.options.soft_cap * torch.tanh(scores / step.options.soft_cap)
    at, key_at = torch.arange(length - count, length)[:, None], torch.arange(length)[None]
    visible = key_at <= at
    if step.options.window is not None:
        visible &= key_at > at - step.options.window
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    weights = weights[:, (at[:, 0] >= first) & (at[:, 0] < end), :size].sum(1)
    return weights.view(step.heads[1], -1, weights.shape[1]).sum(1)


@pytest.mark.parametrize("product_level", PRODUCT_LEVELS, indirect=True, scope="function")
@pytest.mark.parametrize("options", [{}, {"window": 75}, {"soft_cap": 2.0}])
@pytest.mark.parametrize("heads", [(4, 2, 64), (6, 2, 24), (16, 1, 8), (3, 3, 40)])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_sums_are_those_of_the_weights(
    attention: Make, heads: tuple[int, int, int], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Beside sequences that do not vote, and of queries of which some do not; attention is what it was."""
    step = draw([700, 300, 261, 40, 90], [330, 5, 1, 40, 1], heads, dtype=dtype, **options)
    voters: Voters = [(430, 690, 656), (0, 300, 288), (0, 261, 256), (8, 40, 32), None]
    found, sums = voted(attention, step, voters)
    assert torch.equal(found, step.run(attention))
    for which, each in enumerate(voters):
        if each is not None:
            expected = paid(step, which, each)
            error = (torch.from_numpy(sums[which] / VOTE) - expected).abs() / expected.clamp(min=1.0)
            assert error.max() < max(2e-5, TOLERANCES[dtype]), which


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_sums_do_not_depend_on_cuts_threads_or_the_batch(attention: Make, dtype: torch.dtype) -> None:
    whole = draw([600, 333], heads=(6, 2, 32), dtype=dtype)
    voters: Voters = [(3, 598, 592), (301, 333, 320)]
    _, expected = voted(attention, whole, voters)
    for cuts in ([1, 2, 3, 258, 301, 520], list(range(0, 600, 37))[1:], [599]):
        sums = [np.zeros_like(each) for each in expected]
        ends = [*cuts, 600]
        for start, end in zip([0, *cuts], ends, strict=True):
            spans: list[Span] = [(0, start, end)]
            if start < 333:
                spans.append((1, start, min(end, 333)))
            make = partial(attention, num_threads=1 if start else 2)
            voted(make, whole.of(spans), voters[: len(spans)], sums[: len(spans)])
        assert all((one == other).all() for one, other in zip(sums, expected, strict=True))


def test_long_histories_are_computed_in_tiles_of_few_rows(attention: Make) -> None:
    """As much is kept of them as of short ones; their votes are the same."""
    step = draw([20_000], [40], (8, 1, 8))
    found, sums = voted(attention, step, [(19_970, 20_000, 19_984)])
    assert torch.equal(found, step.run(attention))
    expected = paid(step, 0, (19_970, 20_000, 19_984))
    torch.testing.assert_close(torch.from_numpy(sums[0] / VOTE), expected.double(), atol=2e-6, rtol=1e-4)
