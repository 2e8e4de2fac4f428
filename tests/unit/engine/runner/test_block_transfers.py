"""Blocks move beside the model's work; whatever the order of events, everyone reads what the plans say."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from engine.runner import block_transfers
from engine.runner.block_transfers import BlockTransfers
from tests.unit.engine.runner.late_streams import LateStreams

NUM_BLOCKS, NUM_HOST = 9, 7


def tensors_of(num_blocks: int = NUM_BLOCKS) -> list[torch.Tensor]:
    """Pieces of several types and sizes, as a quantized cache has them, nothing written yet."""
    return [
        torch.full((num_blocks, 2, 4, 3), 255, dtype=torch.uint8),
        torch.full((num_blocks, 2, 4), float("nan")),
        torch.full((num_blocks, 6), float("nan"), dtype=torch.bfloat16),
    ]


def fill(tensors: list[torch.Tensor], block: int, content: int) -> None:
    for tensor in tensors:
        tensor[block] = content


def content_of(tensors: list[torch.Tensor], block: int) -> set[float]:
    return {float(value) for tensor in tensors for value in tensor[block].flatten()}


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks to a buffer, so that buffers are scarce."""
    words = sum(tensor[0].nbytes for tensor in tensors_of(1))
    monkeypatch.setattr(block_transfers, "STAGING_BYTES", 2 * block_transfers.NUM_BUFFERS * words)


@dataclass
class Plan:
    offloads: list[tuple[int, int]] = field(default_factory=list)
    restores: list[tuple[int, int]] = field(default_factory=list)
    # What the forward writes.
    written: dict[int, int] = field(default_factory=dict)


def random_plans(seed: int, count: int) -> list[Plan]:
    """Plans as the scheduler makes them: contents leave the host when they are restored, and a host row that
    a plan reads is not written by the same plan.
    """
    chance = random.Random(seed)
    device = {block: block for block in range(NUM_BLOCKS)}
    host: dict[int, int] = {}
    fresh = 100
    plans = [Plan(written=dict(device))]
    for _ in range(1, count):
        plan = Plan()
        out = chance.sample(range(NUM_BLOCKS), chance.randrange(6))
        coming = chance.sample(sorted(host), min(len(host), chance.randrange(5), len(out)))
        rows = chance.sample([row for row in range(NUM_HOST) if row not in coming], min(len(out), 3))
        plan.offloads = list(zip(out, rows, strict=False))
        plan.restores = list(zip(coming, chance.sample(range(NUM_BLOCKS), len(coming)), strict=True))
        before = dict(device)
        for row, block in plan.restores:
            device[block] = host.pop(row)
        for block, row in plan.offloads:
            host[row] = before[block]
        for block in chance.sample(range(NUM_BLOCKS), chance.randrange(NUM_BLOCKS)):
            fresh = 100 + (fresh - 99) % 150
            plan.written[block] = device[block] = fresh
        plans.append(plan)
    return plans


def expected_contents(plans: list[Plan]) -> list[dict[int, int]]:
    """What the forward of each plan finds in the blocks."""
    device: dict[int, int] = {}
    host: dict[int, int] = {}
    found = []
    for plan in plans:
        host.update({row: device[block] for block, row in plan.offloads})
        device.update({block: host[row] for row, block in plan.restores})
        found.append(dict(device))
        device.update(plan.written)
    return found


@pytest.mark.parametrize("favourite", ["", "compute", "copy"])
@pytest.mark.parametrize("seed", range(25))
def test_every_forward_reads_what_the_plans_say(seed: int, favourite: str) -> None:
    plans, late, tensors = random_plans(seed, 40), LateStreams(seed, favourite), tensors_of()
    transfers = BlockTransfers(tensors, NUM_HOST, late.streams)
    found: list[dict[int, set[float]]] = []

    def forward(plan: Plan) -> Callable[[], None]:
        def work() -> None:
            found.append({block: content_of(tensors, block) for block in range(NUM_BLOCKS)})
            for block, content in plan.written.items():
                fill(tensors, block, content)

        return work

    for plan in plans:
        late.some()
        transfers.apply(plan.offloads, plan.restores)
        late.compute.run(forward(plan))
        late.some()
    late.all()
    for wanted, blocks in zip(expected_contents(plans), found, strict=True):
        assert blocks.items() >= {block: {float(value)} for block, value in wanted.items()}.items()


def test_the_model_does_not_wait_for_what_leaves() -> None:
    late, tensors = LateStreams(0), tensors_of()
    transfers = BlockTransfers(tensors, NUM_HOST, late.streams)
    fill(tensors, 3, 42)
    transfers.apply([(3, 1)], [])
    late.compute.run(lambda: fill(tensors, 3, 7))
    while late.compute.advance():
        pass
    assert content_of(tensors, 3) == {7.0}
    transfers.apply([], [(1, 0)])
    late.all()
    assert content_of(tensors, 0) == {42.0}


def test_a_row_is_fetched_while_the_model_computes() -> None:
    late, tensors = LateStreams(0), tensors_of()
    transfers = BlockTransfers(tensors, NUM_HOST, late.streams)
    fill(tensors, 0, 11)
    transfers.apply([(0, 2)], [])
    late.all()
    late.compute.run(lambda: None)
    transfers.apply([], [(2, 5)])
    assert late.copy.advance(), "the model's step before it has not ended"
    late.all()
    assert content_of(tensors, 5) == {11.0}


def test_more_blocks_than_all_buffers_hold_leave_and_return() -> None:
    late, tensors = LateStreams(0), tensors_of()
    transfers = BlockTransfers(tensors, NUM_HOST, late.streams)
    for block in range(6):
        fill(tensors, block, block + 1)
    transfers.apply([(block, block) for block in range(6)], [])
    transfers.apply([], [(row, 8 - row) for row in range(6)])
    late.all()
    assert [content_of(tensors, 8 - row) for row in range(6)] == [{row + 1.0} for row in range(6)]
