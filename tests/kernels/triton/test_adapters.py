"""Low-rank adapters in Triton and in torch against the formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.adapters.reference import TorchAdapterStep, TorchChanges
from kernels.adapters.triton_adapters import TritonAdapterStep
from tests.kernels.adapters_cases import SHAPES, expected, fill, some_rows


def make(name: str, dtype: torch.dtype = torch.float32) -> TorchChanges:
    inputs, sizes, ranks = SHAPES[name]
    most = max(max(parts) for parts in ranks)
    return TorchChanges(
        inputs, sizes, num_slots=len(ranks), max_rank=most, dtype=dtype, device=torch.device("cpu")
    )


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("count", [1, 9, 70])
def test_rows_of_several_adapters_get_what_theirs_add(backend: str, name: str, count: int) -> None:
    changes = make(name)
    drawn = fill(changes, name)
    x, out, slots = some_rows(name, count)
    there = torch.tensor(slots)
    step = TorchAdapterStep(there) if backend == "torch" else TritonAdapterStep(there, changes.num_slots)
    found = step.add(changes, torch.from_numpy(x), torch.from_numpy(out.copy()))
    np.testing.assert_allclose(found.numpy(), expected(drawn, x, out, slots), rtol=2e-5, atol=2e-3)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_row_has_the_bits_that_it_has_alone(backend: str) -> None:
    name = "q, k and v"
    changes = make(name, torch.bfloat16)
    fill(changes, name)
    x, out, slots = some_rows(name, 70)
    rows, there = torch.from_numpy(x).bfloat16(), torch.tensor(slots)

    def add(part: slice) -> torch.Tensor:
        given = torch.from_numpy(out[part].copy()).bfloat16()
        if backend == "torch":
            return TorchAdapterStep(there[part]).add(changes, rows[part], given)
        return TritonAdapterStep(there[part], changes.num_slots).add(changes, rows[part], given)

    together = add(slice(0, 70))
    for row in range(0, 70, 9):
        assert torch.equal(add(slice(row, row + 1)), together[row : row + 1])


def test_no_rows_and_rows_of_the_base_model_alone_stay_as_they_are() -> None:
    changes = make("odd")
    fill(changes, "odd")
    x, out, _ = some_rows("odd", 4)
    for backend in (TorchAdapterStep, lambda there: TritonAdapterStep(there, 3)):
        given = torch.from_numpy(out.copy())
        assert torch.equal(backend(torch.full((4,), -1)).add(changes, torch.from_numpy(x), given), given)
        nothing = backend(torch.zeros(0, dtype=torch.int64))
        assert nothing.add(changes, torch.zeros(0, 63), torch.zeros(0, 37)).shape == (0, 37)
