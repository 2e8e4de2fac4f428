"""What Gemma 3n and 4 have beyond the table of test_families: memory of layers that share keys and values,
forms of their configurations, what is refused.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import CacheConfig, EngineConfig
from engine.model.families import read_spec
from engine.model.kv_memory import kv_bytes_per_token
from engine.model.plan import make_plan, plan_input
from engine.model.spec import CheckpointError
from engine.runner.build import build_here
from engine.runner.runner import ModelRunner
from runtime.config import ModelConfig
from tests.unit.engine.checkpoints import edit_config, make_checkpoint, reference_greedy
from tests.unit.engine.model.gemma_cases import CASES, EXPERTS, GEMMA4
from tests.unit.engine.runner.driver import Job, generated, prompt_of


def test_layers_that_share_keys_and_values_take_no_memory(tmp_path: Path) -> None:
    """Four layers store: two slide with heads of 16, two see everything with heads of 24."""
    make_checkpoint(tmp_path, *CASES["gemma4"][:1], **CASES["gemma4"][1])
    spec = read_spec(tmp_path)
    assert kv_bytes_per_token(spec, "float32") == 2 * 2 * (16 + 16 + 24 + 24) * 4
    assert kv_bytes_per_token(spec, "int8") == 2 * 2 * (16 + 16 + 24 + 24) + 4 * 2 * 8
    config = EngineConfig(cache=CacheConfig(kv_cache_bytes=1 << 20))
    runner, plan, _ = build_here(config, ModelConfig(path=str(tmp_path)), lambda phase, part: None)
    assert isinstance(runner, ModelRunner)
    with closing(runner):
        layers = runner.storage.layers
        assert layers[4] is layers[2]
        assert layers[5] is layers[3]
        stored = {id(layer): layer for layer in layers}
        allocated = sum(tensor[:-1].nbytes for layer in stored.values() for tensor in layer.tensors())
        assert allocated == plan.kv_cache_bytes


@pytest.mark.parametrize("quantize", ["int8", "w8a8", "int4"])
@pytest.mark.parametrize("options", [{"native": "required"}, {"attention_backend": "torch"}])
def test_quantized_weights_take_what_was_planned(
    quantize: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """And the layers that share keys and values are calibrated with those that they read."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_kv_shared_layers": 2}
    make_checkpoint(tmp_path, "gemma4_text", **GEMMA4 | EXPERTS | sizes | {"moe_intermediate_size": 32})
    (job,) = generated(tmp_path, [Job(prompt_of(20, 199), num_tokens=3)], quantize=quantize, **options)
    assert len(job.output) == 3
    config = EngineConfig(quantize=quantize, cache=CacheConfig(kv_cache_bytes=1 << 20))
    asked = plan_input(config, ModelConfig(path=str(tmp_path)), device="cpu", available_bytes=1 << 30)
    plain = plan_input(
        EngineConfig(cache=config.cache),
        ModelConfig(path=str(tmp_path)),
        device="cpu",
        available_bytes=1 << 30,
    )
    assert make_plan(asked).weights_bytes < make_plan(plain).weights_bytes


def test_published_configurations_say_the_same(tmp_path: Path) -> None:
    """They name the heads of layers that see everything, where transformers saves what differs by layer."""
    model_type, changes = CASES["gemma4-everything"]
    make_checkpoint(tmp_path, model_type, **changes)
    saved = read_spec(tmp_path)
    edit_config(tmp_path, per_layer_config=None, global_head_dim=24, num_global_key_value_heads=4)
    assert read_spec(tmp_path) == saved


def test_what_is_left_of_shared_keys_is_not_served_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_type, changes = CASES["gemma4"]
    oracle = make_checkpoint(tmp_path, model_type, **changes)
    left = "model.layers.4.self_attn.k_proj.weight"
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {left: torch.randn(32, 48)}, path)
    (job,) = generated(tmp_path, [Job(prompt_of(9, 199), num_tokens=4)])
    assert job.output == reference_greedy(oracle, job.prompt, 4)
    assert f"1 tensors are not served: {left}" in caplog.text


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ({"per_layer_config": {"1": {"sliding_window": 4}}}, r"per_layer_config\.1\.sliding_window"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "per_layer_config gives layers of one kind"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers = 5 leaves no layer of each kind"),
        (
            {"per_layer_config": {"1": {"num_key_value_heads": 3}}},
            "not a multiple of the 3 kv heads of layer 1",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "unheard", "rope_theta": 1.0}}},
            "rope_type 'unheard' is not supported",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_its_name(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gemma4_text", **GEMMA4)
    edit_config(tmp_path, **keys)
    with pytest.raises(CheckpointError, match=said):
        generated(tmp_path, [Job(prompt_of(3, 199), num_tokens=1)])
