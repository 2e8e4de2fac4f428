"""What a scheme needs of a layer and does not find is refused by the tensor's name, and what it finds and
does not need is named as well, in every format.
"""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from engine.model.checkpoint import LoadRequest
from engine.model.decoder import Decoder
from engine.model.families import read_spec
from engine.model.reading import load_decoder
from runtime.errors import ConfigError
from tests.unit.engine.checkpoints import edit_config, make_checkpoint
from tests.unit.engine.quantization import gguf_writer, writers
from tests.unit.engine.quantization.test_stored import CASES, SIZES, compressed
from tests.unit.engine.quantization.writers import Stored, Writer, rewrite

LAYER = "model.layers.1.mlp.down_proj"
# Ranges of inputs, which are rounded here by their own largest magnitude.
UNUSED = {"input_scale", "input_zero_point"}


def packed_in_order(weight: torch.Tensor) -> Stored:
    groups = np.random.default_rng(0).permutation(weight.shape[1])
    return writers.packed(weight, symmetric=False, g_idx=groups)


SETTINGS = {name: (settings, writer) for name, (settings, writer, _) in CASES.items()} | {
    "packed asymmetric in order": (
        compressed("pack-quantized", symmetric=False, actorder="group"),
        packed_in_order,
    ),
}


def stored_by(writer: Writer) -> set[str]:
    return set(writer(torch.randn(64, 96))[0])


PARTS = [(name, part) for name, (_, writer) in SETTINGS.items() for part in sorted(stored_by(writer))]
# Everything that any format stores beside or in place of a weight.
ALL_PARTS = {part for _, part in PARTS} | UNUSED


def load(folder: Path) -> Decoder:
    request = LoadRequest(folder=folder, spec=read_spec(folder), dtype="float32", max_model_len=64)
    return load_decoder(request, device=torch.device("cpu"), progress=lambda phase, part: None)


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces tensors of LAYER, or with None removes them, in the file and so in the index."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for part, tensor in changes.items():
        tensors.pop(f"{LAYER}.{part}", None)
        if tensor is not None:
            tensors[f"{LAYER}.{part}"] = tensor
    save_file(tensors, path, metadata={"format": "pt"})


def checkpoint(folder: Path, name: str) -> None:
    settings, writer = SETTINGS[name]
    rewrite(folder, make_checkpoint(folder, "llama", **SIZES), settings, writer)


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_what_is_missing_is_refused_by_name(name: str, part: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, name)
    load(tmp_path)
    edit(tmp_path, **{part: None})
    if part in UNUSED:
        load(tmp_path)
        return
    with pytest.raises(ConfigError, match=rf"{LAYER}\.{part}\b.*missing"):
        load(tmp_path)


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_too_much_is_named(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint(tmp_path, name)
    known = stored_by(SETTINGS[name][1])
    stray = torch.ones(64, 1)
    for part in sorted(ALL_PARTS - known):
        edit(tmp_path, **{part: stray})
        caplog.clear()
        try:
            load(tmp_path)
            said = caplog.text
        except ConfigError as error:
            said = str(error)
        # One stray order makes an order of all layers.
        others = part == "g_idx" and "self_attn.q_proj.g_idx of shape [64] is missing" in said
        assert others or f"{LAYER}.{part}" in said, part
        edit(tmp_path, **{part: None})


@pytest.mark.parametrize("name", SETTINGS)
def test_a_dense_layer_with_a_part_of_a_quantized_one_is_refused(name: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, name)
    known = stored_by(SETTINGS[name][1])
    parts = known - UNUSED - {"weight"}
    edit(tmp_path, **dict.fromkeys(known))
    edit(tmp_path, weight=torch.randn(64, 96))
    load(tmp_path)
    for part in sorted(parts):
        edit(tmp_path, **{part: torch.ones(64, 1)})
        with pytest.raises(ConfigError, match=rf"{LAYER}\.{part} .*{LAYER}\.weight is stored in F32"):
            load(tmp_path)
        edit(tmp_path, **{part: None})


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "tensor", [f"{LAYER}.weight", "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
)
def test_numbers_without_a_scale_are_no_weights(tensor: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", **SIZES)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[tensor] = tensors[tensor].to(dtype)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"tensor {tensor} is stored in .*scaled by"):
        load(tmp_path)


def test_zero_points_of_symmetric_levels_are_refused(tmp_path: Path) -> None:
    settings = compressed("int-quantized", num_bits=8, strategy="channel", group_size=None)
    oracle = make_checkpoint(tmp_path, "llama", **SIZES)
    rewrite(tmp_path, oracle, settings, writers.int_quantized)
    edit(tmp_path, weight_zero_point=torch.zeros(64, 1, dtype=torch.int8))
    load(tmp_path)
    edit(tmp_path, weight_zero_point=torch.ones(64, 1, dtype=torch.int8))
    with pytest.raises(ConfigError, match=rf"{LAYER}\.weight_zero_point .*config_groups.*symmetric"):
        load(tmp_path)


def test_the_group_that_names_a_layer_says_what_it_needs(tmp_path: Path) -> None:
    """Two groups: only the layers of one have zero points."""
    settings = compressed("int-quantized", num_bits=8, strategy="channel", group_size=None)
    groups = settings["config_groups"]
    named = json.loads(json.dumps(groups["group_0"])) | {"targets": ["re:.*down_proj"]}
    named["weights"]["symmetric"] = False
    groups["group_1"] = named
    oracle = make_checkpoint(tmp_path, "llama", **SIZES)
    rewrite(tmp_path, oracle, settings, writers.int_quantized)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.down_proj\.weight_zero_point .*missing"):
        load(tmp_path)


def test_unused_ranges_are_said_with_names_and_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        for scale in ("k_scale", "v_scale"):
            tensors[f"model.layers.{layer}.self_attn.{scale}"] = torch.tensor(0.5)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        load(tmp_path)
    (said,) = [record.getMessage() for record in caplog.records if "not used" in record.getMessage()]
    assert "5 tensors are not used: " in said
    for name in ("lm_head.weight", "model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"):
        assert name in said


@pytest.mark.parametrize("part", ["blocks", "scales"])
def test_parts_of_mxfp4_are_needed(part: str, tmp_path: Path) -> None:
    sizes = {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8}
    make_checkpoint(tmp_path, "gpt_oss", **SIZES, **sizes)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    made = [writers.mxfp4(expert.T.contiguous()) for expert in tensors.pop(name)]
    tensors[f"{name}_blocks"] = torch.stack([blocks for blocks, _, _ in made])
    tensors[f"{name}_scales"] = torch.stack([scales for _, scales, _ in made])
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load(tmp_path)
    del tensors[f"{name}_{part}"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"{name}_{part} .*missing"):
        load(tmp_path)


@pytest.mark.parametrize("length", ["long", "short"])
def test_one_of_two_tables_of_a_gguf_rotation_is_refused(length: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = make_checkpoint(tmp_path / "source", "llama")
    extra = {f"rope_factors_{length}.weight": np.ones(6, np.float32)}
    gguf_writer.write(path, model, "llama", {"": Kind.F32}, extra=extra)
    other = {"long": "short", "short": "long"}[length]
    with pytest.raises(ConfigError, match=rf"rope_factors_{other}\.weight is missing"):
        read_spec(path)


def test_a_stray_tensor_of_a_gguf_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = make_checkpoint(tmp_path / "source", "llama")
    gguf_writer.write(
        path, model, "llama", {"": Kind.F32}, extra={"blk.1.ffn_mystery.scale": np.ones(1, np.float32)}
    )
    with pytest.raises(ConfigError, match=r"1 unexpected tensors .*blk\.1\.ffn_mystery\.scale"):
        load(path)


def test_the_last_name_of_a_desc_act_checkpoint_is_needed_in_every_layer(tmp_path: Path) -> None:
    settings = SETTINGS["gptq desc_act"][0]
    oracle = make_checkpoint(tmp_path, "llama", **SIZES)
    writer = partial(writers.gptq, with_g_idx=False)
    rewrite(tmp_path, oracle, settings, writer)
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.q_proj\.g_idx .*missing"):
        load(tmp_path)


SPUN = {
    "config_groups": {"R4": {"type": "hadamard", "apply": [{"location": "input", "targets": ["Linear"]}]}}
}


@pytest.mark.parametrize(
    ("name", "group", "changes", "words"),
    [
        ("packed asymmetric", {"targets": ["re:.*nothing"]}, {}, "weight_zero_point .*missing"),
        ("packed", {"targets": ["re:*"]}, {}, r"group_0\.targets .* is no pattern"),
        ("packed", {}, {"transform_config": SPUN}, r"R4\.apply\.location = 'input'"),
        ("gptq", {}, {"checkpoint_format": "gptq_v2", "format": "gptq"}, "format = 'gptq' .*'gptq_v2'"),
    ],
)
def test_settings_that_cannot_be_what_the_layers_are(
    name: str, group: dict[str, Any], changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    checkpoint(tmp_path, name)
    edit(tmp_path, weight_zero_point=None)
    settings = json.loads(json.dumps(SETTINGS[name][0] | changes))
    for each in settings.get("config_groups", {}).values():
        each.update(group)
    edit_config(tmp_path, quantization_config=settings)
    with pytest.raises(ConfigError, match=words):
        load(tmp_path)


@pytest.mark.parametrize("settings", ["fp8", ["fp8"], 8])
def test_settings_that_are_no_table_are_refused(settings: Any, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", **SIZES)
    edit_config(tmp_path, quantization_config=settings)
    with pytest.raises(ConfigError, match=r"quantization_config = .* is not a table"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "part", "scale"),
    [
        ("int8", "weight_scale", torch.ones(64, 0)),
        ("int8", "weight_scale", torch.ones(64, 5)),
        ("int8", "weight_scale", torch.ones(64, 1, 1)),
        ("packed", "weight_scale", torch.ones(64, 0)),
        ("int8", "weight_scale", torch.ones(64, 1, dtype=torch.int32)),
        ("fp8", "weight_scale", torch.ones(64, 1, dtype=torch.uint8)),
        ("fp8 blocks", "weight_scale_inv", torch.ones(2, 2, dtype=torch.uint8)),
        ("gptq", "scales", torch.ones(3, 64, dtype=torch.int8)),
    ],
)
def test_what_can_scale_nothing_is_refused_by_name(
    name: str, part: str, scale: torch.Tensor, tmp_path: Path
) -> None:
    checkpoint(tmp_path, name)
    edit(tmp_path, **{part: scale})
    with pytest.raises(ConfigError, match=rf"{LAYER}\.{part}"):
        load(tmp_path)
