"""DeepSeek-V3.2 and GLM-5: attention over the positions that an indexer chooses equals transformers', and its
keys are in the memory plan.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.model.families import read_spec
from engine.model.kv_memory import kv_bytes_per_token
from engine.model.spec import CheckpointError
from runtime.errors import ConfigError
from tests.unit.engine.checkpoints import edit_config, make_checkpoint, reference_greedy
from tests.unit.engine.model.equality import TORCH, assert_equals_transformers
from tests.unit.engine.runner.driver import Job, generated, prompt_of

DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "index_n_heads": 5,
    "index_head_dim": 14,
    "index_topk": 7,
}


@pytest.mark.parametrize("num_chosen", [7, 1000])
def test_equals_transformers(num_chosen: int, tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, "deepseek_v32", **DEEPSEEK | {"index_topk": num_chosen})
    assert_equals_transformers(tmp_path, oracle, ways=(TORCH, ({}, 1000)))


@pytest.mark.parametrize("changes", [{}, {"indexer_types": ["full", "shared", "shared"]}])
def test_layers_may_take_what_others_chose(changes: dict[str, Any], tmp_path: Path) -> None:
    """GLM-5, whose indexer rotates other pairs."""
    # With few heads some positions have scores of zero, as below.
    oracle = make_checkpoint(tmp_path, "glm_moe_dsa", **DEEPSEEK | {"index_n_heads": 24} | changes)
    assert_equals_transformers(tmp_path, oracle, ways=(TORCH, ({}, 1000)))
    keys = changes.get("indexer_types", ["full"] * 3).count("full")
    assert kv_bytes_per_token(read_spec(tmp_path), "float32") == (3 * (16 + 8) + keys * 14) * 4


def test_published_configurations_say_who_chooses_by_pattern_or_number(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa", **DEEPSEEK | {"indexer_types": ["full", "full", "shared"]})
    listed = read_spec(tmp_path)
    for keys in (
        {"index_topk_pattern": "FFS"},
        {"index_topk_pattern": ["full", "full", "shared"]},
        {"index_topk_freq": 2, "index_skip_topk_offset": 2},
    ):
        edit_config(tmp_path, indexer_types=None, index_topk_pattern=None)
        edit_config(tmp_path, **keys)
        assert read_spec(tmp_path) == listed


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"indexer_types": ["full", "shared"]}, "indexer_types must name 3 layers"),
        ({"indexer_types": ["full", "none", "full"]}, "indexer_types must name 3 layers"),
        ({"indexer_types": ["shared", "full", "full"]}, "no layer before the first one"),
    ],
)
def test_layers_that_nobody_chooses_for_are_refused(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "glm_moe_dsa", **DEEPSEEK)
    edit_config(tmp_path, **keys)
    with pytest.raises(CheckpointError, match=said):
        read_spec(tmp_path)


def test_long_prompts_choose_over_all_pieces(tmp_path: Path) -> None:
    # With few heads some queries score all positions with zeros, of which transformers takes any.
    changes = {"index_topk": 20, "index_n_heads": 24, "max_position_embeddings": 1024}
    oracle = make_checkpoint(tmp_path, "deepseek_v32", **DEEPSEEK | changes)
    prompt = prompt_of(600, 199)
    (job,) = generated(tmp_path, [Job(prompt, num_tokens=4, chunk=250)], max_model_len=1024)
    assert job.output == reference_greedy(oracle, prompt, 4)


@pytest.mark.parametrize("quantize", ["int8", "w8a8"])
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("deepseek_v32", {}), ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full"]})],
)
def test_its_products_are_quantized_as_others(
    model_type: str, changes: dict[str, Any], quantize: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, model_type, **DEEPSEEK | changes)
    (job,) = generated(tmp_path, [Job(prompt_of(20, 199), num_tokens=3)], quantize=quantize)
    assert len(job.output) == 3


def test_its_keys_take_memory(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v32", **DEEPSEEK)
    assert kv_bytes_per_token(read_spec(tmp_path), "float32") == 3 * (16 + 8 + 14) * 4


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"index_head_dim": 6}, "index_head_dim = 6 is less than the 8 rotated"),
        ({"q_lora_rank": 0}, "q_lora_rank is missing"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_name(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v32", **DEEPSEEK)
    edit_config(tmp_path, **keys)
    with pytest.raises(CheckpointError, match=said):
        read_spec(tmp_path)


def test_back_ends_that_lack_it_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v32", **DEEPSEEK)
    for options, said in (
        ({"native": "required"}, "an indexer chooses the positions"),
        ({"attention_backend": "reference"}, "reference has no attention over positions"),
    ):
        with pytest.raises(ConfigError, match=said):
            generated(tmp_path, [Job(prompt_of(3, 199), num_tokens=1)], **options)
