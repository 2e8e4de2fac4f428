"""Quantization at load: errors of the size that the number of levels allows, and a model that still works."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig, QuantizationConfig
from engine.quantization import at_load
from engine.quantization.at_load import int4_weight, int8_weight, quantize, rounding_weight
from engine.quantization.scheme import group_size_for
from engine.types import SamplingParams
from kernels.linear.formats import DenseWeight, Int4Weight, Int8Weight
from kernels.linear.reference import pack_linear
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.quantization.writers import stored_bytes
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of

SCORING = SamplingParams(temperature=0.0, max_tokens=64, prompt_logprobs=1)
# Mean difference of a prompt's log-probabilities from the dense model's. These are random models of large
# weights, so the differences are far above what a trained model shows.
LIMITS = {"int8": 0.1, "w8a8": 0.2, "int4": 0.9}


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(weight: Tensor, quantized: DenseWeight | Int8Weight | Int4Weight) -> float:
    """Relative squared error."""
    return float((quantized.dequantize() - weight).square().sum() / weight.square().sum())


def test_int8_levels_cover_each_output() -> None:
    weight = draw(1, 40, 96) * torch.logspace(-4, 4, 40)[:, None]
    made = int8_weight(weight)
    assert torch.equal(made.values.abs().amax(1), torch.full((40,), 127, dtype=torch.int8))
    # Rounding is off by at most half a level.
    assert float(((made.dequantize() - weight).abs() / made.scale).max()) <= 0.501
    assert int8_weight(torch.zeros(2, 8)).dequantize().tolist() == [[0.0] * 8] * 2


@pytest.mark.parametrize("shape", [(1, 1), (64, 3), (65, 64), (3, 2000)])
def test_pieces_give_what_the_whole_gives(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_load, "PIECE_ELEMENTS", 640)
    weight = torch.randn(shape).bfloat16()
    found = int8_weight(weight)
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    assert torch.equal(found.scale, scale)
    assert torch.equal(found.values, (weight.float() / scale).round().to(torch.int8))


@pytest.mark.parametrize("lift", [0.0, 3.0])
def test_pieces_of_groups_and_of_smoothed_weights(lift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lifted weights take minimums, and one choice holds for all pieces."""
    weight, ranges = (draw(3, 65, 128) + lift).bfloat16(), draw(4, 128).abs()
    whole = int4_weight(weight, 32), rounding_weight(weight, ranges)
    monkeypatch.setattr(at_load, "PIECE_ELEMENTS", 640)
    pieces = int4_weight(weight, 32), rounding_weight(weight, ranges)
    assert pieces[0].minimum is not None or not lift
    for one, other in zip(whole, pieces, strict=True):
        assert torch.equal(one.dequantize(), other.dequantize())


def test_a_large_head_is_not_copied_whole() -> None:
    """The process may have little more than what the plan says."""
    weight = torch.ones(60_000, 1024, dtype=torch.bfloat16)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak of resident memory cannot be reset here")
    before, made = _status_bytes("VmRSS"), int8_weight(weight)
    assert _status_bytes("VmHWM") - before < stored_bytes(made) + weight.nbytes


def _status_bytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.parametrize(("size", "limit"), [(32, 0.0065), (64, 0.0085), (128, 0.011)])
def test_int4_error_of_normal_weights(size: int, limit: float) -> None:
    weight = draw(2, 64, 512)
    made = int4_weight(weight, size)
    assert made.group_size == size
    assert error(weight, made) < limit


def test_int4_is_exact_where_sixteen_levels_are_enough() -> None:
    levels = torch.randint(0, 16, (8, 64), generator=torch.Generator().manual_seed(1)).float()
    levels[:, 0::32], levels[:, 1::32] = 0.0, 15.0
    scale = torch.rand(8, 2, generator=torch.Generator().manual_seed(2)) + 0.1
    weight = (levels.view(8, 2, 32) * scale[..., None] + 0.25).flatten(1)
    made = int4_weight(weight, 32)
    assert made.minimum is not None
    torch.testing.assert_close(made.dequantize(), weight, atol=1e-5, rtol=0)
    centred = ((levels - 8).view(8, 2, 32) * scale[..., None]).flatten(1)
    assert int4_weight(centred, 32).minimum is None
    torch.testing.assert_close(int4_weight(centred, 32).dequantize(), centred, atol=1e-5, rtol=0)


def test_asymmetric_levels_serve_one_sided_weights() -> None:
    weight = draw(3, 16, 128).abs() + 1
    made = int4_weight(weight, 64)
    assert made.minimum is not None
    assert error(weight, made) < 0.002


def test_smoothing_tames_outliers() -> None:
    """Two inputs a hundred times larger than the others: with known ranges the error falls several times."""
    weight, x = draw(4, 64, 96), draw(5, 32, 96)
    x[:, 7], x[:, 50] = x[:, 7] * 100, x[:, 50] * 100
    expected = x @ weight.T
    plain = pack_linear(rounding_weight(weight, None))(x) - expected
    smoothed = pack_linear(rounding_weight(weight, x.abs().amax(0)))(x) - expected
    assert float(smoothed.norm()) < 0.3 * float(plain.norm())
    silent = rounding_weight(weight, torch.zeros(96))
    assert silent.smoothing is not None
    assert silent.dequantize().isfinite().all()


@pytest.mark.parametrize(
    ("inputs", "wanted", "size"), [(256, 128, 128), (96, 128, 32), (640, 64, 64), (48, 64, 0)]
)
def test_group_sizes_fit_the_inputs(inputs: int, wanted: int, size: int) -> None:
    assert group_size_for(inputs, wanted) == size
    config = EngineConfig(quantize="int4", quantization=QuantizationConfig(group_size=wanted))
    made = quantize(draw(1, 8, inputs), config)
    assert isinstance(made, Int4Weight) == bool(size)


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "deepseek_v2", "gpt_oss"])
@pytest.mark.parametrize("method", ["int8", "w8a8", "int4"])
def test_every_kind_of_layer_is_quantized(model_type: str, method: str, tmp_path: Path) -> None:
    """A quantized model's outputs are near the dense one's, and rows stay independent of the batch."""
    extra: dict[str, object] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    if model_type == "mixtral":
        extra |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if model_type == "deepseek_v2":
        extra |= {"num_key_value_heads": 4, "moe_intermediate_size": 32, "n_shared_experts": 1}
        extra |= {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
        extra |= {"v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
        extra |= {"first_k_dense_replace": 1}
    if model_type == "gpt_oss":
        extra |= {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    make_checkpoint(tmp_path, model_type, **extra)
    prompt = prompt_of(21, 199)
    jobs = []
    for setting in ("off", method):
        with closing(open_runner(tmp_path, native="off", quantize=setting)) as runner:
            quantized = runner.model.layers[-1].attention.output.weight
            assert isinstance(quantized, DenseWeight) == (setting == "off")
            (alone,) = Driver(runner).run([Job(prompt, num_tokens=6, sampling=SCORING)])
            among = Driver(runner).run([Job(prompt_of(n, 199, seed=n), num_tokens=6) for n in (5, 21, 40)])
            again = Driver(runner).run([Job(prompt, num_tokens=6, chunk=7), *(Job(j.prompt) for j in among)])
        assert again[0].output == alone.output
        jobs.append(alone)
    scores = [torch.tensor([entry.logprob for entry in job.prompt_logprobs]) for job in jobs]
    difference = float((scores[1] - scores[0]).abs().mean())
    assert 0 < difference < LIMITS[method]
