"""Whole models through Triton's interpreter, by the runner's own dispatch: the tokens of torch."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import msgspec
import pytest
import torch

from engine.model import layers
from engine.model.decoder import Decoder
from engine.types import SamplingParams
from kernels.config import KernelsConfig
from kernels.linear.formats import DenseWeight, Fp8Weight
from kernels.linear.triton_backend import TritonLinear
from kernels.norm.triton_norm import TritonNorm
from kernels.selection import OPERATIONS
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.model.hybrids import HYBRIDS
from tests.unit.engine.model.test_families import CASES
from tests.unit.engine.quantization.test_stored import FP8, compressed, rewrite
from tests.unit.engine.quantization.writers import block_fp8, float_quantized
from tests.unit.engine.runner.driver import GREEDY, Driver, Job, open_runner, prompt_of

TRITON = KernelsConfig(**dict.fromkeys(OPERATIONS, "triton"))
TORCH = KernelsConfig(**dict.fromkeys(OPERATIONS, "torch"))
# The interpreter is slow: where a test is about products, it interprets products.
PRODUCTS = msgspec.structs.replace(TORCH, linear="triton")
VOCAB = 199

SAMPLED = [
    GREEDY,
    SamplingParams(temperature=0.9, top_p=0.8, seed=4, max_tokens=64),
    SamplingParams(
        temperature=1.2,
        top_k=20,
        min_p=0.02,
        seed=1 << 63,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=-0.2,
        logit_bias={3: 2.0, 9: -50.0},
        min_tokens=4,
        stop_token_ids=(3, 11),
        max_tokens=64,
    ),
]


def tokens(folder: Path, kernels: KernelsConfig, **options: Any) -> list[list[int]]:
    """Outputs of three sequences, one of them in chunks."""
    asked = {"max_model_len": 96, "native": "off", "kv_cache_bytes": 4 << 20} | options
    with closing(open_runner(folder, kernels=kernels, **asked)) as runner:
        assert isinstance(runner.model, Decoder)
        assert runner.model.kernels.names["norm"] == kernels.norm
        jobs = [
            Job(prompt_of(length, VOCAB, seed=length), 4, sampling, chunk=chunk)
            for (length, chunk), sampling in zip(((19, 8), (3, 64), (24, 64)), SAMPLED, strict=True)
        ]
        return [job.output for job in Driver(runner).run(jobs)]


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "llama-biases", "qwen3", "gemma2", "olmo2", "phi3", "mixtral", "gpt-oss", "deepseek-v2"),
        *("cohere-norms", "hunyuan", "apertus", "gpt-neox", "phi", "gpt2", "qwen2-moe", "llama4"),
        *("lfm2-bias", "qwen3-next-heads", "kimi-linear", "jamba", "bamba", "falcon-h1", "recurrent-gemma"),
        *("mamba", "mamba2"),
    ],
)
def test_tokens_are_those_of_torch(tmp_path: Path, name: str) -> None:
    # Of each kind of layer one.
    model_type, changes = HYBRIDS[name] if name in HYBRIDS else CASES[name]
    if name not in HYBRIDS:
        changes = changes | {"num_hidden_layers": 2}
    make_checkpoint(tmp_path, model_type, **changes)
    expected = tokens(tmp_path, TORCH, attention_backend="torch")
    assert tokens(tmp_path, TRITON, attention_backend="triton") == expected
    assert len({tuple(output) for output in expected}) == len(expected)


@pytest.mark.parametrize("quantize", ["int8", "w8a8", "int4", "fp8"])
def test_quantized_products(tmp_path: Path, quantize: str) -> None:
    make_checkpoint(tmp_path, "llama", hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    options = {"quantize": quantize, "attention_backend": "torch"}
    assert tokens(tmp_path, PRODUCTS, **options) == tokens(tmp_path, TORCH, **options)


@pytest.mark.parametrize("name", ["llama", "deepseek-v2"])
def test_an_invariant_model_gives_a_request_the_bits_that_it_has_alone(tmp_path: Path, name: str) -> None:
    model_type, changes = CASES[name]
    make_checkpoint(tmp_path, model_type, **changes | {"num_hidden_layers": 2})
    kernels = msgspec.structs.replace(TRITON, linear="invariant")
    runner = open_runner(
        tmp_path, kernels=kernels, native="off", attention_backend="triton", kv_cache_bytes=4 << 20
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=64, logprobs=2)

    def job(length: int) -> Job:
        return Job(prompt_of(length, VOCAB, seed=length), 3, sampling, chunk=24)

    with closing(runner):
        together = Driver(runner).run([job(length) for length in (19, 3, 40)])
        for length, found in zip((19, 3, 40), together, strict=True):
            (alone,) = Driver(runner, seed=length).run([job(length)])
            assert (alone.output, alone.logprobs) == (found.output, found.logprobs)


@pytest.mark.parametrize("quantize", ["int8", "w8a8", "int4", "fp8"])
def test_quantized_experts_are_captured_and_draw_the_same(
    tmp_path: Path, quantize: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, changes = CASES["mixtral"]
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    make_checkpoint(tmp_path, model_type, **changes | sizes)
    options = {"quantize": quantize, "attention_backend": "torch"}
    runner = open_runner(tmp_path, kernels=PRODUCTS, native="off", kv_cache_bytes=4 << 20, **options)
    assert isinstance(runner.model, Decoder)
    assert runner.model.captures
    runner.close()
    together = tokens(tmp_path, PRODUCTS, **options)
    monkeypatch.setattr(TritonLinear, "grouped", lambda self, weights: None)
    assert tokens(tmp_path, PRODUCTS, **options) == together


@pytest.mark.parametrize("quantize", ["w8a8", "fp8"])
@pytest.mark.parametrize("model_type", ["llama", "gpt_neox"])
def test_norms_round_for_the_products_that_follow(
    tmp_path: Path, model_type: str, quantize: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_key_value_heads": 4}
    make_checkpoint(tmp_path, model_type, **sizes)
    options = {"quantize": quantize, "attention_backend": "torch"}
    calls: list[str] = []
    plain = TritonNorm.quantized

    def counted(self: TritonNorm, *arguments: Any, **named: Any) -> Any:
        calls.append(arguments[3])
        return plain(self, *arguments, **named)

    monkeypatch.setattr(TritonNorm, "quantized", counted)
    kernels = msgspec.structs.replace(PRODUCTS, norm="triton")
    fused = tokens(tmp_path, kernels, **options)
    assert set(calls) == {"int8" if quantize == "w8a8" else "fp8"}
    # Two norms in every step.
    assert len(calls) % 2 == 0
    num_calls = len(calls)
    # Nothing is one any more.
    monkeypatch.setattr(layers, "QuantizingNorm", NoneType)
    assert tokens(tmp_path, kernels, **options) == fused
    assert len(calls) == num_calls


@pytest.mark.parametrize(
    ("blocked", "hidden"), [(False, 64), (True, 128)], ids=["per tensor", "blocks of 128"]
)
def test_fp8_checkpoints_stay_fp8(tmp_path: Path, blocked: bool, hidden: int) -> None:
    """They round inputs, too, so tokens may differ from those of dense weights: compared are logits."""
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "head_dim": 32, "num_hidden_layers": 1}
    oracle = make_checkpoint(tmp_path, "llama", **sizes)
    if blocked:
        settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
        rewrite(tmp_path, oracle, settings, partial(block_fp8, block=128))
    else:
        rewrite(tmp_path, oracle, compressed("float-quantized", **FP8), float_quantized)
    rows = torch.randn(16, hidden, generator=torch.Generator().manual_seed(0))
    outputs = []
    for kernels in (TRITON, TORCH):
        runner = open_runner(
            tmp_path, kernels=kernels, native="off", attention_backend="torch", kv_cache_bytes=4 << 20
        )
        assert isinstance(runner.model, Decoder)
        weight = runner.model.layers[0].feed_forward.down.weight
        assert isinstance(weight, Fp8Weight if kernels is TRITON else DenseWeight)
        product = runner.model.layers[0].feed_forward.gate_up.product
        outputs.append(product(rows))
        runner.close()
    error = (outputs[0] - outputs[1]).norm() / outputs[1].norm()
    assert 0 < error < 0.04


@pytest.mark.parametrize(
    "cache",
    [{"kv_dtype": "fp8"}, {"kv_dtype": "kivi4", "kv_dtype_layers": {"0": "int8"}, "block_size": 64}],
    ids=["fp8", "mixed"],
)
def test_quantized_caches(tmp_path: Path, cache: dict[str, object]) -> None:
    make_checkpoint(tmp_path, "llama", head_dim=16)
    options = {"cache": cache}
    expected = tokens(tmp_path, TORCH, attention_backend="torch", **options)
    assert tokens(tmp_path, TRITON, attention_backend="triton", **options) == expected
