"""The choice of experts and their sum in Triton against the reference."""

from __future__ import annotations

import pytest
import torch

from kernels.activation.reference import gate
from kernels.experts import reference
from kernels.experts.grouped import ExpertsTogether
from kernels.experts.routing import Routing
from kernels.experts.triton_experts import combine, route
from kernels.linear.triton_backend import InvariantLinear
from tests.kernels.drawn import drawn, weight_of
from tests.kernels.routings import ROUTINGS


@pytest.mark.parametrize("name", sorted(ROUTINGS))
@pytest.mark.parametrize("corrected", [False, True])
def test_the_choice_is_that_of_the_reference(name: str, corrected: bool) -> None:
    routing = ROUTINGS[name]
    logits = drawn(33, routing.num_experts) * 2
    correction = drawn(routing.num_experts, seed=1).abs() if corrected else None
    if routing.scoring == "softmax_of_best":
        correction = None
    ids, shares = route(logits, routing, correction)
    expected_ids, expected = reference.route(logits, routing, correction)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(shares, expected)


def test_tokens_that_are_not_finite_stay_alone_and_choose_experts_that_there_are() -> None:
    for routing in ROUTINGS.values():
        logits = drawn(5, routing.num_experts)
        logits[1] = float("nan")
        logits[3, 0] = float("nan")
        ids, shares = route(logits, routing)
        assert bool(((ids >= 0) & (ids < routing.num_experts)).all())
        assert all(len(set(chosen)) == routing.num_active for chosen in ids.tolist())
        assert shares.isnan().any(dim=1).tolist()[1]
        assert shares[[0, 2, 4]].isfinite().all()


@pytest.mark.parametrize("size", [1, 40, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_in_the_tokens_own_order(size: int, dtype: torch.dtype) -> None:
    results, shares, shared = drawn(15, size).to(dtype), drawn(5, 3, seed=1), drawn(5, size, seed=2).to(dtype)
    each = results.view(5, 3, size).float() * shares[..., None]
    # A GPU multiplies and adds at once.
    expected = ((each[:, 0] + each[:, 1]) + each[:, 2]).to(dtype)
    torch.testing.assert_close(combine(results, shares), expected)
    torch.testing.assert_close(combine(results, shares, shared), expected + shared)


@pytest.mark.parametrize("kind", ["int4 minimum", "int8", "w8a8", "fp8", "fp8 blocks"])
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
def test_a_layer_of_experts_is_its_products_gated_and_added(kind: str, activation: str) -> None:
    hidden, size, tokens, count = 256, 128, 19, 4
    routing = Routing(num_experts=count, num_active=2)
    ups = [weight_of(kind, 2 * size, hidden, seed=10 * index) for index in range(count)]
    downs = [weight_of(kind, hidden, size, seed=10 * index + 5) for index in range(count)]
    biases = drawn(count, 2 * size, seed=7), drawn(count, hidden, seed=8)
    linear = InvariantLinear()
    gate_up, down = linear.grouped(ups), linear.grouped(downs)
    assert gate_up is not None
    assert down is not None
    together = ExpertsTogether(gate_up, down, (biases[0].flatten(), biases[1].flatten()))
    x, logits, shared = (
        drawn(tokens, hidden) / 50,
        drawn(tokens, count, seed=3),
        drawn(tokens, hidden, seed=4),
    )
    options = {"correction": None, "activation": activation}
    found = together(x, logits, routing, shared=shared, **options)
    ids, shares = reference.route(logits, routing)
    expected = shared.clone()
    for index in range(count):
        inner = gate(activation, linear.pack(ups[index])(x) + biases[0][index])
        share = torch.where(ids == index, shares, 0.0).sum(1)
        expected += (linear.pack(downs[index])(inner) + biases[1][index]) * share[:, None]
    assert float((found - expected).norm() / expected.norm()) < 1e-4
    # A token's bits are its own, in any company.
    for part in (slice(0, 1), slice(3, 18)):
        alone = together(x[part], logits[part], routing, shared=shared[part], **options)
        assert torch.equal(alone, found[part])
