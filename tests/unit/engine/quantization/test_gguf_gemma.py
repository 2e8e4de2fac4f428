"""GGUF files of Gemma 3n and 4, by the names and the rules of llama.cpp's converter, give the logits of
transformers' model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from engine.model.spec import CheckpointError
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.model.gemma_cases import EXPERTS, GEMMA3N, GEMMA4
from tests.unit.engine.quantization.test_stored import assert_equals

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("gemma4", GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "gemma4 experts": (
        "gemma4",
        GEMMA4
        | EXPERTS
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 4},
    ),
    "gemma3n": (
        "gemma3n",
        GEMMA3N
        | {"activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0, 0.0, 0.0], "vocab_size_per_layer_input": 199},
    ),
}


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, kind: Kind, tmp_path: Path) -> None:
    arch, changes = CASES[name]
    changes = SIZES | changes
    if arch == "gemma3n":
        del changes["moe_intermediate_size"]
    oracle = make_checkpoint(tmp_path / "original", f"{arch}_text", **changes)
    _write(tmp_path / "model.gguf", oracle, arch, kind)
    assert_equals(tmp_path / "model.gguf", oracle, tolerance=2e-4 if kind is Kind.F32 else 1e-3)


def test_metadata_that_is_cut_short_is_named(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "original", "gemma4_text", **SIZES | GEMMA4)
    _write(tmp_path / "model.gguf", oracle, "gemma4", Kind.F32, heads=[2, 2])
    with pytest.raises(CheckpointError, match="gemma4's metadata cannot be read"):
        assert_equals(tmp_path / "model.gguf", oracle)


def _write(
    path: Path,
    model: transformers.PreTrainedModel,
    arch: str,
    kind: Kind,
    heads: list[int] | None = None,
) -> None:
    """Stores matrices in that type, and gives the model the weights that this stands for."""
    writer = gguf.GGUFWriter(str(path), arch)
    _describe(writer, model.config, arch, heads)
    stacked: dict[str, list[NDArray[Any]]] = {}
    scalars = {name: part for name, part in model.named_buffers() if name.endswith("layer_scalar")}
    with torch.no_grad():
        for name, tensor in {**dict(model.named_parameters()), **scalars}.items():
            values = tensor.numpy().copy()
            used = kind if values.ndim > 1 and values.shape[-1] % 32 == 0 else Kind.F32
            data = gguf.quants.quantize(values.astype(np.float32), used)
            meaning = gguf.quants.dequantize(data, used).astype(np.float32).reshape(values.shape)
            tensor.copy_(torch.from_numpy(meaning))
            target = _target(name, arch, model.config.num_hidden_layers)
            if target.startswith("altup_"):
                stacked.setdefault(target, []).append(data)
            else:
                writer.add_tensor(target, data, raw_dtype=used)
    for target, parts in stacked.items():
        writer.add_tensor(target, np.stack(parts), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _target(name: str, arch: str, num_layers: int) -> str:
    """What the converter calls a tensor."""
    stem, _, suffix = name.rpartition(".")
    block = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    own = {"scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}
    if stem.endswith(".router") and suffix in own:
        return f"{block}.{own[suffix]}"
    if name.startswith("model.altup_"):
        return {"projections": "altup_proj.weight", "unembed_projections": "altup_unembd_proj.weight"}[
            stem.split(".")[1].removeprefix("altup_")
        ]
    if suffix != "weight":
        # Tensors that are no layer's weight get that end.
        stem, suffix = name, "weight"
    number = {each: index for index, each in gguf.MODEL_ARCH_NAMES.items()}[arch]
    target = gguf.get_tensor_name_map(number, num_layers).get_name(stem)
    assert target is not None, name
    return f"{target}.{suffix}"


def _describe(writer: gguf.GGUFWriter, config: Any, arch: str, heads: list[int] | None) -> None:
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_float32(f"{arch}.final_logit_softcapping", config.final_logit_softcapping or 1e9)
    writer.add_eos_token_id(7)
    if arch == "gemma3n":
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_altup_active_idx(config.altup_active_idx)
        writer.add_altup_num_inputs(config.altup_num_inputs)
        normal = torch.distributions.normal.Normal(0, 1)
        shares = torch.tensor(config.activation_sparsity_pattern)
        writer.add_activation_sparsity_scale(normal.icdf(shares).tolist())
        return
    size, count = config.intermediate_size, config.num_hidden_layers
    shared = range(count - config.num_kv_shared_layers, count)
    doubled = config.use_double_wide_mlp
    sizes = [2 * size if doubled and layer in shared else size for layer in range(count)]
    writer.add_feed_forward_length(sizes if doubled else size)
    layers = config.per_layer_config
    full, sliding = (layers[slides.index(kind)] for kind in (False, True))
    kv_heads = [sliding.num_key_value_heads if slide else full.num_key_value_heads for slide in slides]
    writer.add_head_count_kv(heads or kv_heads)
    writer.add_key_length(full.head_dim)
    writer.add_key_length_swa(sliding.head_dim)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    share = config.rope_parameters["full_attention"]["partial_rotary_factor"]
    turning = int(full.head_dim * share / 2)
    factors = [1.0] * turning + [1e30] * (full.head_dim // 2 - turning)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
