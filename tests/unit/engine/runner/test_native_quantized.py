"""Quantized weights natively beside torch. An input between two levels may be rounded either way."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model.native_decoder import NativeDecoder
from engine.types import SamplingParams
from kernels.native.library import NativeUnavailableError, load_native
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.quantization.test_stored import CASES, SIZES
from tests.unit.engine.quantization.writers import rewrite
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of

PROBE = SamplingParams(temperature=0.0, max_tokens=64, prompt_logprobs=199)
# Largest difference of a log-probability, and of all on average. An input of W8A8, or a key in int8, that
# lies between two levels may be rounded to either.
EXACT_INPUTS = (5e-3, 5e-4)
ROUNDED_INPUTS = (0.1, 2e-3)
INT8_CACHE = (0.25, 0.02)

# No size is a multiple of what a kernel takes at once.
ODD = {"hidden_size": 80, "intermediate_size": 104, "head_dim": 20}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "biases, tied head": ("qwen2", ODD | {"tie_word_embeddings": True}),
    "one layer": ("qwen3", ODD | {"num_hidden_layers": 1}),
    "experts": ("mixtral", ODD | {"num_local_experts": 3, "num_experts_per_tok": 2}),
}

try:
    load_native()
except NativeUnavailableError as reason:
    pytest.skip(f"no native kernels: {reason}", allow_module_level=True)


def served(folder: Path, native: str, **options: Any) -> tuple[Tensor, list[int]]:
    """Log-probabilities [T, V] of a prompt in chunks, and a greedy continuation."""
    with closing(open_runner(folder, native=native, **options)) as runner:
        assert isinstance(runner.model, NativeDecoder) == (native == "required")
        (job,) = Driver(runner).run([Job(prompt_of(45, 199), num_tokens=8, sampling=PROBE, chunk=13)])
    assert len(job.output) == 8, job.failure
    scores = torch.full((len(job.prompt_logprobs), 199), float("nan"))
    for row, entry in zip(scores, job.prompt_logprobs, strict=True):
        row[torch.tensor(entry.top_ids)] = torch.tensor(entry.top_logprobs)
    return scores, job.output


def assert_within(limits: tuple[float, float], ours: Tensor, theirs: Tensor) -> None:
    difference = (ours - theirs).abs()
    largest, mean = float(difference.max()), float(difference.mean())
    assert largest <= limits[0]
    assert mean <= limits[1]


@pytest.mark.parametrize("name", CASES)
def test_stored_formats_give_the_tokens_of_torch(name: str, tmp_path: Path) -> None:
    settings, writer, _ = CASES[name]
    rewrite(tmp_path, make_checkpoint(tmp_path, "llama", **SIZES), settings, writer)
    (ours, output), (theirs, expected) = (served(tmp_path, native) for native in ("required", "off"))
    assert output == expected
    assert_within(EXACT_INPUTS, ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["int8", "w8a8", "int4"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_weights_that_are_quantized_at_load(family: str, method: str, kv_dtype: str, tmp_path: Path) -> None:
    model_type, changes = FAMILIES[family]
    make_checkpoint(tmp_path, model_type, **changes)
    options = {"quantize": method, "cache": {"kv_dtype": kv_dtype}}
    (ours, _), (theirs, _) = (served(tmp_path, native, **options) for native in ("required", "off"))
    limits = ROUNDED_INPUTS if method == "w8a8" else EXACT_INPUTS
    assert_within(INT8_CACHE if kv_dtype == "int8" else limits, ours, theirs)
