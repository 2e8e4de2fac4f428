"""What a machine's rates allow a step and a prompt, by hand."""

from __future__ import annotations

import pytest

from benchmarks.engine.cpu_step import beside
from benchmarks.peers.checkpoints import matrix_parameters
from benchmarks.peers.roofline import Machine, Precision

CHECKPOINT = "llama-40m"
# 8 layers of 512: 8 heads of 64, 4 of keys and values, 1,536 wide; a head of 32,000.
LAYER = 512 * 64 * (8 + 2 * 4 + 8) + 3 * 512 * 1536
HEAD = 32_000 * 512


def shown(rows: int, context: int, *, read: float = 1e9, multiply: float = 1e12) -> dict[str, float]:
    machine = Machine(read_bytes_per_s=read, bfloat16_flops_per_s=multiply, int8_ops_per_s=multiply)
    row = {"work": "", "rows": rows, "context": context, "ms": 1000.0, "native %": 100.0, "others": 0.0}
    found = beside(row, machine, CHECKPOINT, Precision())
    return {name: float(value) for name, value in found.items() if name != "work"}


def test_a_step_reads_weights_once_and_keys_of_every_row() -> None:
    assert matrix_parameters(CHECKPOINT) == 8 * LAYER + HEAD
    found = shown(rows=4, context=100)
    keys_and_values = 4 * 100 * 8 * 2 * 4 * 64
    assert found["baseline: read ms"] == pytest.approx(2 * (8 * LAYER + HEAD + keys_and_values) / 1e6)
    # A product with each weight; with each key and each value, for every head.
    attention = 4 * 100 * 8 * 8 * 64 * 4
    assert found["baseline: multiply ms"] == pytest.approx((2 * 4 * (8 * LAYER + HEAD) + attention) / 1e9)


def test_a_prompt_sees_half_of_itself_and_takes_the_head_once() -> None:
    found = shown(rows=1000, context=0)
    attention = 1000 * 1000 / 2 * 8 * 8 * 64 * 4
    operations = 2 * 1000 * 8 * LAYER + 2 * HEAD + attention
    assert found["baseline: multiply ms"] == pytest.approx(operations / 1e9)
    assert found["baseline: read ms"] == pytest.approx(2 * (8 * LAYER + HEAD) / 1e6)


def test_the_share_is_that_of_the_longer() -> None:
    assert (slow := shown(8, 64, read=1e8))["share %"] == pytest.approx(slow["baseline: read ms"] / 10)
    slow = shown(8, 64, read=1e12, multiply=1e9)
    assert slow["share %"] == pytest.approx(slow["baseline: multiply ms"] / 10)
