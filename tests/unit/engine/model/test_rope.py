"""Rotations equal transformers' for every rule, wherever config.json says it, and reach as far."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.config import EngineConfig
from engine.model.families import read_spec
from engine.model.plan import plan_input
from engine.model.rope import rope_table
from engine.model.spec import CheckpointError
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from tests.unit.engine.checkpoints import SMALL, edit_config, make_checkpoint

ORIGINAL = {"original_max_position_embeddings": 64}
# Factors of the six pairs of a head of twelve.
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0]}
RULES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "yarn by mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7, **ORIGINAL},
    "yarn by attention": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, **ORIGINAL},
    "yarn betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, **ORIGINAL},
    "yarn not cut": {"rope_type": "yarn", "factor": 4.0, "truncate": False, **ORIGINAL},
    "yarn not cut by null": {"rope_type": "yarn", "factor": 4.0, "truncate": None, **ORIGINAL},
    "yarn without original": {"rope_type": "yarn", "factor": 4.0},
    "longrope": {"rope_type": "longrope", **FACTORS, **ORIGINAL},
    "longrope by factor": {"rope_type": "longrope", "factor": 8.0, **FACTORS, **ORIGINAL},
    "longrope by attention": {"rope_type": "longrope", "attention_factor": 1.2, **FACTORS, **ORIGINAL},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **ORIGINAL,
    },
}
THETA = 500.0


def write(folder: Path, **keys: Any) -> None:
    config = {"architectures": ["LlamaForCausalLM"], **SMALL, "torch_dtype": "float32", "rms_norm_eps": 1e-6}
    (folder / "config.json").write_text(json.dumps(config | keys))


def theirs(rule: dict[str, Any], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [L, R/2] of a prompt of so many tokens."""
    config = transformers.LlamaConfig(**SMALL, rope_parameters=rule | {"rope_theta": THETA})
    rope = LlamaRotaryEmbedding(config)
    cos, sin = rope(torch.zeros(1), torch.arange(length)[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling", "both"])
@pytest.mark.parametrize("name", RULES)
def test_equals_transformers(name: str, key: str, tmp_path: Path) -> None:
    rule = RULES[name]
    older = {("type" if name == "rope_type" else name): value for name, value in rule.items()}
    keys: dict[str, dict[str, Any]] = {
        "rope_parameters": {"rope_parameters": rule | {"rope_theta": THETA}},
        "rope_scaling": {"rope_scaling": older, "rope_theta": THETA},
        "both": {"rope_scaling": older, "rope_parameters": rule, "rope_theta": THETA},
    }
    write(tmp_path, **keys[key])
    (rope,) = read_spec(tmp_path).ropes
    # Within the original length and beyond it; dynamic tables hold each position as decoding comes to it.
    for length in (50, 256):
        ours = rope_table(rope, length)
        for mine, expected in zip(ours, theirs(rule, length), strict=True):
            torch.testing.assert_close(mine, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("rule", "positions", "usable", "longest"),
    [
        ({"rope_type": "default"}, 1024, 1024, 1024),
        ({"rope_type": "yarn", "factor": 2.0}, 1024, 2048, 2048),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}, 1024, 2048, 2048),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}, 2048, 2048, 2048),
        # Its own length lies between the original and the stretched one (Qwen3).
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 1280, 4096, 4096),
        (RULES["llama3"], 1024, 1024, 1024),
        (RULES["longrope"], 1024, 1024, 1024),
        ({"rope_type": "linear", "factor": 4.0}, 1024, 1024, 4096),
        ({"rope_type": "dynamic", "factor": 4.0}, 1024, 1024, 4096),
    ],
)
def test_the_window_is_what_the_rotation_reaches(
    rule: dict[str, Any], positions: int, usable: int, longest: int, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "llama")
    edit_config(tmp_path, rope_parameters=rule, max_position_embeddings=positions)

    def window(asked: int) -> int:
        config = EngineConfig(max_model_len=asked)
        model = ModelConfig(path=str(tmp_path))
        return plan_input(config, model, device="cpu", available_bytes=1 << 34).max_model_len

    assert window(0) == usable
    assert window(longest) == longest
    for beyond in (longest + 1, 100_000):
        with pytest.raises(ConfigError, match=rf"max_model_len = {beyond} exceeds the {longest} positions"):
            window(beyond)


@pytest.mark.parametrize(
    ("keys", "first", "second"),
    [
        (
            {
                "rope_scaling": {"type": "yarn", "factor": 2.0},
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0},
            },
            r"rope_parameters\.factor = 4\.0",
            r"rope_scaling\.factor = 2\.0",
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0},
            },
            r"rope_parameters\.rope_type = 'dynamic'",
            r"rope_scaling\.rope_type = 'linear'",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 500.0}},
            r"rope_parameters\.rope_type = 'default'",
            r"rope_scaling\.rope_type = 'linear'",
        ),
        (
            {"rope_scaling": RULES["yarn by attention"], "rope_parameters": RULES["yarn"]},
            r"rope_parameters\.attention_factor = None",
            r"rope_scaling\.attention_factor = 1\.3",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_theta": 10_000.0},
            r"rope_parameters\.rope_theta = 500\.0",
            r"rope_theta = 10000\.0",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}},
            r"rope_scaling\.rope_type = 'linear'",
            r"rope_scaling\.type = 'dynamic'",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.25},
            r"rope_parameters\.partial_rotary_factor = 0\.5",
            r"partial_rotary_factor = 0\.25",
        ),
        (
            {"rope_scaling": RULES["yarn"], "original_max_position_embeddings": 128},
            r"rope_scaling\.original_max_position_embeddings = 64",
            r"original_max_position_embeddings = 128",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_by_both_keys(
    keys: dict[str, Any], first: str, second: str, tmp_path: Path
) -> None:
    write(tmp_path, **keys)
    with pytest.raises(CheckpointError, match=f"{first} and {second} contradict each other"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 0},
        {"rope_theta": math.inf},
        {"rope_theta": math.nan},
        {"rope_theta": 10**400},
        {"partial_rotary_factor": 0},
        {"partial_rotary_factor": -1},
        {"partial_rotary_factor": 2},
        {"head_dim": 2, "rope_parameters": RULES["dynamic"]},
        {"rope_parameters": {"rope_type": {"yarn": 2}}},
        {"rope_parameters": RULES["longrope"] | {"short_factor": ["a"] * 6, "long_factor": ["a"] * 6}},
        {"rope_parameters": RULES["longrope"] | {"short_factor": [0] * 6, "long_factor": [0] * 6}},
        *(
            {"rope_parameters": RULES[name] | {key: value}}
            for name in ("linear", "dynamic", "yarn", "llama3")
            for key, value in (("factor", 0), ("factor", -2.0), ("factor", math.inf), ("factor", math.nan))
        ),
        *(
            {"rope_parameters": RULES[name] | {"original_max_position_embeddings": value}}
            for name in ("yarn", "longrope")
            for value in (0, -5)
        ),
        {"rope_parameters": RULES["longrope"] | {"original_max_position_embeddings": 1}},
        {"rope_parameters": RULES["llama3"] | {"low_freq_factor": 0}},
        {"rope_parameters": RULES["yarn"] | {"beta_fast": -3}},
        {"rope_parameters": RULES["yarn"] | {"rope_theta": 1.0}},
    ],
    ids=str,
)
def test_numbers_that_give_no_rotation_are_refused(keys: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, **keys)

    def tables() -> list[tuple[torch.Tensor, torch.Tensor]]:
        ropes = read_spec(tmp_path).ropes
        assert all(rope.longest_positions for rope in ropes)
        return [rope_table(rope, 200) for rope in ropes]

    with pytest.raises(CheckpointError):
        tables()


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("value", ["yarn", [2.0], {"rope_theta": "many"}, {"rope_type": "unheard"}])
def test_what_is_no_rotation_is_refused_by_its_key(key: str, value: Any, tmp_path: Path) -> None:
    write(tmp_path, **{key: value})
    with pytest.raises(CheckpointError, match=key):
        read_spec(tmp_path)
