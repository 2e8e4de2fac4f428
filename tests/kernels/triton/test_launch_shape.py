"""Launch shapes of the attention kernel: what was measured, and what a device has room for."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from kernels.attention import triton_attention
from kernels.attention.launch_shape import LaunchShape, launch_shape, next_smaller
from kernels.attention.triton_attention import TritonAttention
from kernels.attention.tuning import TABLE, forced, key_of, read_table
from tests.kernels.attention import compare, draw


def test_what_is_tuned_is_what_the_engine_reads(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"sm_90": {"prefill 128/4 plain": [128, 64, 8, 3]}}))
    assert read_table(path) == {"sm_90": {"prefill 128/4 plain": (128, 64, 8, 3)}}
    assert read_table(TABLE) is not None
    for wrong in ([128, 64, 8], [100, 64, 8, 3], [128, 64, 32, 3], [128, 64, 8, 0], [8, 64, 8, 3]):
        path.write_text(json.dumps({"sm_90": {"prefill 128/4 plain": wrong}}))
        with pytest.raises(ValueError, match="prefill 128/4 plain"):
            read_table(path)


def test_a_measured_shape_comes_before_the_standing_one() -> None:
    def shape(arch: str = "sm_90") -> tuple[int, int, int, int]:
        found = launch_shape(group=4, key_dim=128, final=True, kv="plain", arch=arch)
        return found.tile, found.step, found.num_warps, found.num_stages

    key = key_of(final=True, key_dim=128, group=4, kv="plain")
    before = shape()
    with forced(key, (64, 16, 4, 2)):
        assert shape() == (64, 16, 4, 2)
    assert shape() == before
    assert shape("sm_00") == shape("")


class SmallDevice:
    """Stands for the attention kernel on a device with little shared memory."""

    def __init__(self, kernel: Any, rows: int) -> None:
        self.kernel, self.rows = kernel, rows
        self.num_refused = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*given: Any, **named: Any) -> None:
            wanted = named["TILE"] + named["STEP"] * named["num_stages"]
            if wanted > self.rows:
                self.num_refused += 1
                raise OutOfResources(wanted, self.rows, "shared memory")
            self.kernel[grid](*given, **named)

        return launch


@pytest.mark.parametrize("rows", [60, 40, 32])
def test_a_device_without_room_computes_with_a_smaller_shape(
    rows: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small = SmallDevice(triton_attention.attention_kernel, rows)
    monkeypatch.setattr(triton_attention, "attention_kernel", small)
    step = draw([300, 70, 40], [1, 50, 40], (32, 1, 16))
    attention = TritonAttention(num_heads=32, num_kv_heads=1)
    with caplog.at_level(logging.WARNING):
        found = compare(lambda **heads: attention, step, 2e-5, 1e-4)
    refused = small.num_refused
    assert len(caplog.records) == refused > 0
    for shape in attention.smaller.values():
        assert f"{shape} takes its place" in caplog.text
    again = step.run(lambda **heads: attention)
    assert small.num_refused == refused, "what was refused is not asked for again"
    assert torch.equal(again, found)


def test_captured_steps_fall_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    small = SmallDevice(triton_attention.attention_kernel, 32)
    monkeypatch.setattr(triton_attention, "attention_kernel", small)
    step = draw([300], [1], (32, 1, 16))
    attention = TritonAttention(num_heads=32, num_kv_heads=1)
    plan = attention.plan_decode(
        triton_attention.DecodeBatch(
            context_lens=torch.tensor([300], dtype=torch.int32),
            block_tables=torch.from_numpy(step.tables).int(),
            block_size=16,
            max_context_len=512,
        )
    )
    attention.begin(plan)
    found = attention.run(plan, step.q, step.cache, step.options)
    assert small.num_refused > 0
    assert torch.equal(found, step.run(lambda **heads: attention))


def test_a_device_without_room_for_the_smallest_shape_says_so() -> None:
    refusal = OutOfResources(100, 10, "shared memory")
    with pytest.raises(OutOfResources, match="Required: 100"):
        next_smaller(LaunchShape(heads=4, tile=16, step=16, num_warps=4, num_stages=1), refusal)
