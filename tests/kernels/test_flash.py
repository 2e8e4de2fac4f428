"""The flash-attn back end against the reference, on modules that do and check what flash-attn documents."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from kernels.attention import flash as flash_module
from kernels.attention.choice import AttentionFacts, UnsuitableBackendError, choose_backend, why_not
from kernels.attention.flash import FlashAttention, FlashPlan
from kernels.attention.flash_library import FlashUnavailableError, find_library
from kernels.attention.reference import ReferenceAttention
from tests.kernels import fake_flash
from tests.kernels.attention import CPU, batch_of, compare, draw

HOPPER, AMPERE = (9, 0), (8, 0)
# History and new tokens of each sequence: decodes first, prompts first, mixed, prompts alone.
SHAPES = [
    ([600, 33, 100], [1, 3, 100]),
    ([300, 50, 129, 400], [200, 1, 60, 17]),
    ([90, 700, 40], [90, 129, 17]),
]


FACTS: dict[str, Any] = {"dtype": torch.bfloat16, "head_dim": 128, "value_dim": 128, "sinks": False}
FACTS["shares_values"] = False


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    made = fake_flash.modules()
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


def flash_of(capability: tuple[int, int], **heads: int) -> FlashAttention:
    """What a device of this capability has, beside the reference."""
    return FlashAttention(rest=ReferenceAttention(**heads), library=find_library(CPU, capability), **heads)


def check(
    lengths: list[int], new: list[int], capability: tuple[int, int], tolerance: float = 1e-2, **drawn: Any
) -> None:
    step = draw(lengths, new, **{"dtype": torch.bfloat16, "q_dtype": torch.bfloat16} | drawn)
    compare(partial(flash_of, capability), step, tolerance, tolerance)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
@pytest.mark.parametrize(("lengths", "new"), SHAPES)
@pytest.mark.parametrize("heads", [(4, 2, 16), (6, 2, 24), (5, 1, 8)])
def test_ragged_batches(
    lengths: list[int], new: list[int], heads: tuple[int, int, int], capability: tuple[int, int]
) -> None:
    check(lengths, new, capability, heads=heads, padding=5)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
@pytest.mark.parametrize("window", [1, 17, 256])
def test_windows_and_soft_caps(window: int, capability: tuple[int, int]) -> None:
    check([600, 530, 40], [1, 300, 40], capability, scale=0.3, window=window, soft_cap=2.0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float32])
def test_caches_of_other_types_are_gathered(fakes: dict[str, Any], dtype: torch.dtype) -> None:
    check([300, 20], [120, 20], HOPPER, 2e-2, dtype=dtype)
    assert [call["paged"] for call in fakes["flash_attn"].calls] == [False]


def test_pages_are_read_in_place_by_version_3(fakes: dict[str, Any]) -> None:
    check([300, 90], [1, 90], HOPPER)
    (call,) = fakes["flash_attn"].calls
    assert call["paged"]
    assert call["num_splits"] == 1, "more splits would depend on the batch"
    # [block, head, place, dim] seen as [block, place, head, dim]: no copy.
    assert call["strides"] == (2 * 16 * 16, 16, 16 * 16, 1)


def test_version_2_reads_its_own_page_size_in_place(fakes: dict[str, Any]) -> None:
    assert find_library(CPU, AMPERE).page_multiple == 256
    fakes["flash_attn"].calls.clear()
    check([300, 700], [60, 19], AMPERE, block_size=256)
    assert [call["paged"] for call in fakes["flash_attn"].calls][-1]
    check([300, 700], [60, 19], AMPERE, block_size=64)
    assert not [call["paged"] for call in fakes["flash_attn"].calls][-1]


def test_forks_with_small_pages_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash.modules(page_multiple=16)["flash_attn"])
    assert find_library(CPU, AMPERE).takes_pages(64)


@pytest.mark.usefixtures("fakes")
def test_long_histories_are_cut_into_calls_or_left_to_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_module, "GATHERED_POSITIONS", 256)
    lengths, new = [200, 90, 60, 300], [40, 30, 20, 50]
    check(lengths, new, HOPPER)
    flash = flash_of(HOPPER, num_heads=4, num_kv_heads=2)
    plan = flash.plan(batch_of(lengths, new, np.zeros((4, 19), np.int64)), CPU)
    assert isinstance(plan, FlashPlan)
    assert [group.tolist() for group in plan.groups] == [[0], [1, 2]]
    assert plan.rest_rows == slice(90, 140)


@pytest.mark.usefixtures("fakes")
def test_decoding_is_wholly_the_rests() -> None:
    flash = flash_of(HOPPER, num_heads=4, num_kv_heads=2)
    batch = batch_of([600, 33], [1, 16], np.zeros((2, 38), np.int64))
    assert flash.plan(batch, CPU) is batch


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "float32"),
        ({"shares_values": True}, "latent"),
        ({"sinks": True}, "sinks"),
        ({"head_dim": 264, "value_dim": 264}, "264"),
        ({"head_dim": 20, "value_dim": 20}, "20"),
        ({"head_dim": 192}, "192 and 128"),
    ],
)
def test_what_it_cannot_do_is_named(changes: dict[str, Any], reason: str) -> None:
    assert why_not(AttentionFacts(**FACTS)) == ""
    assert reason in why_not(AttentionFacts(**FACTS | changes))
    with pytest.raises(UnsuitableBackendError):
        choose_backend("flash", AttentionFacts(**FACTS | changes), CPU)


def test_the_newest_library_that_suits_the_device_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake_flash.modules()
    monkeypatch.setitem(sys.modules, "flash_attn", made["flash_attn"])
    monkeypatch.setitem(sys.modules, "flash_attn_interface", made["flash_attn_interface"])
    assert find_library(CPU, HOPPER).name == "flash-attn 3"
    assert find_library(CPU, AMPERE).name == "flash-attn 2.8.3"
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    assert find_library(CPU, HOPPER).name == "flash-attn 2.8.3"
    made["flash_attn"].__version__ = "2.5.9"
    with pytest.raises(FlashUnavailableError, match=r"2\.5\.9 is older than 2\.6"):
        find_library(CPU, HOPPER)
    with pytest.raises(FlashUnavailableError, match=r"8\.0"):
        find_library(CPU, (7, 5))
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(FlashUnavailableError, match=r"version 3: .*version 2: "):
        find_library(CPU, HOPPER)


def test_without_a_gpu_torch_is_chosen_and_flash_refused() -> None:
    facts = AttentionFacts(**FACTS)
    assert choose_backend("auto", facts, CPU).name == "torch"
    assert choose_backend("reference", facts, CPU).name == "reference"
    with pytest.raises(UnsuitableBackendError, match="GPU"):
        choose_backend("flash", facts, CPU)


def test_on_a_gpu_what_is_installed_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    facts = AttentionFacts(**FACTS)
    made = fake_flash.modules()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", made["flash_attn_interface"])
    monkeypatch.setattr(flash_module, "installed_library", lambda: find_library(CPU, HOPPER))
    choice = choose_backend("auto", facts, gpu)
    assert (choice.name, choice.why) == ("flash", "flash-attn 3 for prompts, Triton for decoding")
    monkeypatch.setattr(flash_module, "installed_library", lambda: find_library(CPU, (7, 5)))
    choice = choose_backend("auto", facts, gpu)
    assert choice.name == "triton"
    assert "8.0" in choice.why
    with pytest.raises(UnsuitableBackendError, match=r"8\.0"):
        choose_backend("flash", facts, gpu)
