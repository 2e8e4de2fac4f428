"""Zamba2: layers share blocks, each use with products of its own, and the embedding is read behind it; equals
transformers, which torch computes alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine.config import AdaptersConfig, EngineConfig, ParallelConfig
from engine.model.adapter_memory import adapter_bytes
from engine.model.families import read_spec
from engine.model.kv_memory import kv_bytes_per_token
from engine.model.plan import plan_input
from engine.model.spec import CheckpointError
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from tests.unit.engine.checkpoints import edit_config, make_checkpoint, reference_greedy
from tests.unit.engine.model.equality import TORCH, assert_equals_transformers
from tests.unit.engine.runner.driver import Job, generated, open_runner, prompt_of
from tests.unit.engine.runner.test_states import engine

TURNS = ["mamba", "hybrid", "mamba", "hybrid", "hybrid"]
ZAMBA2: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layers_block_type": TURNS,
    "num_key_value_heads": 4,
    "num_mem_blocks": 2,
    "adapter_rank": 3,
    "n_mamba_heads": 8,
    "mamba_d_state": 20,
    "mamba_ngroups": 2,
    "use_mem_rope": True,
    "use_shared_attention_adapter": True,
}
PLAIN = {
    "num_mem_blocks": 1,
    "use_mem_rope": False,
    "use_shared_attention_adapter": False,
    "num_key_value_heads": 2,
    "mamba_ngroups": 1,
    "add_bias_linear": True,
    "time_step_min": 0.3,
    "hidden_act": "gelu_pytorch_tanh",
}
ALONE = {"layers_block_type": ["mamba", "hybrid", "mamba"], "num_hidden_layers": 3, "num_mem_blocks": 3}


@pytest.mark.parametrize("changes", [{}, PLAIN, ALONE], ids=["two", "one", "alone"])
def test_equals_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, "zamba2", **ZAMBA2 | changes)
    assert_equals_transformers(tmp_path, oracle, ways=(TORCH, ({}, 1000)))


def test_prefixes_and_preempted_answers_go_on(tmp_path: Path) -> None:
    """Through the scheduler, with twelve blocks for six answers that grow to five blocks each."""
    oracle = make_checkpoint(tmp_path, "zamba2", **ZAMBA2)
    shared = prompt_of(37, 199)
    with engine(tmp_path, native="off", num_blocks=12) as driver:
        prompts = [[*shared, *prompt_of(3, 199, seed=index)] for index in range(6)]
        first = driver.submit(prompts[0], max_tokens=4, temperature=0.0)
        driver.run()
        requests = [driver.submit(prompt, max_tokens=40, temperature=0.0) for prompt in prompts]
        driver.run()
        counters = driver.scheduler.load(driver.now).counters
        assert counters.num_preemptions
        assert counters.prefix_hit_tokens >= 32
        assert driver.tokens(first) == driver.tokens(requests[0])[:4]
        for request, prompt in zip(requests, prompts, strict=True):
            tokens = driver.tokens(request)
            assert tokens == reference_greedy(oracle, prompt, 40, tokens)


def test_blocks_may_be_stored_with_every_layer_that_uses_them(tmp_path: Path) -> None:
    """As transformers keeps them in memory."""
    oracle = make_checkpoint(tmp_path, "zamba2", **ZAMBA2)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    again = {
        name.replace("layers.1.", "layers.4."): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith("model.layers.1.shared_transformer.")
    }
    assert not again.keys() & tensors.keys()
    save_file(tensors | again, path)
    (job,) = generated(tmp_path, [Job(prompt_of(20, 199), num_tokens=4)])
    assert job.output == reference_greedy(oracle, job.prompt, 4)


def test_keys_and_values_are_those_of_layers_that_use_blocks(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "zamba2", **ZAMBA2)
    spec = read_spec(tmp_path)
    # Heads are of twice the hidden size.
    assert kv_bytes_per_token(spec, "float32") == 3 * 2 * (2 * 48) * 4
    assert spec.state is not None
    assert spec.state.layers == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_what_is_shared_is_quantized_once(quantize: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "zamba2", **ZAMBA2 | {"hidden_size": 64, "n_mamba_heads": 8})
    (job,) = generated(tmp_path, [Job(prompt_of(20, 199), num_tokens=3)], quantize=quantize)
    assert len(job.output) == 3


def test_room_for_adapters_is_what_products_of_states_take(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "zamba2", **ZAMBA2)
    runner = open_runner(tmp_path, attention_backend="torch")
    try:
        taken = [linear for linear in runner.model.record.linears() if linear.parts]
        elements = sum(
            16 * (linear.inputs * len(linear.parts) + sum(size for _, size in linear.parts))
            for linear in taken
        )
        asked = AdaptersConfig(slots=1, max_rank=16)
        assert adapter_bytes(runner.model.spec, asked, 4) == 4 * elements
    finally:
        runner.close()


@pytest.mark.parametrize(
    "keys",
    [
        {"use_long_context": True},
        {"tie_word_embeddings": False},
        {"layers_block_type": ["mamba", "hybrid"]},
        {"layers_block_type": ["mamba", "attention", "mamba", "hybrid", "hybrid"]},
        {"n_mamba_heads": 7},
        {"num_key_value_heads": 2},
    ],
)
def test_what_is_not_computed_is_refused_by_its_name(keys: dict[str, Any], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "zamba2", **ZAMBA2)
    edit_config(tmp_path, layer_types=None, **keys)
    with pytest.raises(CheckpointError, match=next(iter(keys))):
        read_spec(tmp_path)


def test_ranks_and_weights_that_inputs_scale_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "zamba2", **ZAMBA2)
    config = EngineConfig(parallel=ParallelConfig(pipeline=2), num_threads=2)
    with pytest.raises(ConfigError, match="has blocks that layers share, which ranks do not share"):
        plan_input(config, ModelConfig(path=str(tmp_path)), device="cpu", available_bytes=1 << 33)
    with pytest.raises(ConfigError, match=r"quantize = 'w8a8': layers of Zamba2.* share blocks"):
        open_runner(tmp_path, quantize="w8a8")
