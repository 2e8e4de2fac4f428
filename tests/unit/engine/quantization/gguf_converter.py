"""Small checkpoints as GGUF in float32, as llama.cpp's converter makes them, for architectures in which it
changes more than names: a writer of its own, by the names of the `gguf` package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.numpy import load_file

Numbers = NDArray[np.float32]
# Those whose rows of q and k are reordered, those with one added to norms, and those whose heads take turns.
PAIRED = ("granitehybrid", "granitemoe", "mistral3")
LATENT = ("deepseek2", "kimi-linear", "mistral4")
SHIFTED = ("qwen35", "qwen35moe", "qwen3next")
TILED = ("qwen35", "qwen35moe")
TURNING = ("attn_qkv", "ssm_conv1d", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt", "ssm_out")
COMMON = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}


def convert(
    folder: Path,
    path: Path,
    arch: str,
    metadata: Mapping[str, Any],
    kinds: Mapping[str, Kind] | None = None,
    extra: Mapping[str, Numbers] | None = None,
) -> None:
    """Writes the checkpoint in `folder`; `metadata` is what `COMMON` does not tell, `kinds` types by parts of
    names, which are the oracle's only where its numbers are exact in them.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(path), arch)
    given = {name: config[key] for name, key in COMMON.items() if config.get(key) is not None}
    if config.get("rope_parameters"):
        given["rope.freq_base"] = float(config["rope_parameters"]["rope_theta"])
    for name, value in (given | dict(metadata)).items():
        _add(writer, f"{arch}.{name}", value)
    writer.add_eos_token_id(7)
    number = {name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(number, (given | dict(metadata))["block_count"])
    tensors = load_file(folder / "model.safetensors")
    if arch == "apertus":
        _add_coefficients(writer, tensors)
    for name, values in _taken_apart(tensors, arch):
        stem, suffix = _stem(name)
        # Falcon-H1's norms are known by whole names.
        found = names.get_name(stem) or names.get_name(name)
        assert found is not None, name
        target = found + suffix
        kind = next((kind for part, kind in (kinds or {}).items() if part in target), Kind.F32)
        data = gguf.quants.quantize(_changed(np.ascontiguousarray(values), target, arch, config), kind)
        writer.add_tensor(target, data, raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _add_coefficients(writer: gguf.GGUFWriter, tensors: dict[str, Numbers]) -> None:
    """What activations have learned becomes metadata, in the order of layers."""
    for part in ("alpha_p", "alpha_n", "beta", "eps"):
        names = sorted(name for name in tensors if name.endswith(f".act_fn.{part}"))
        writer.add_array(f"xielu.{part}", [float(tensors.pop(name).item()) for name in names])


def _stem(name: str) -> tuple[str, str]:
    """What the package knows a tensor by, and what stands behind it in the file."""
    if name.endswith((".A_log", ".D")):
        return name, ""
    if name.endswith(".dt_bias"):
        return name.replace(".dt_bias", ".dt_proj"), ".bias"
    if name.endswith(".sinks"):
        return name, ".weight"
    if name.endswith(("e_score_correction_bias", ".expert_bias")):
        return name.replace("e_score_correction_bias", "e_score_correction"), ".bias"
    stem, _, suffix = name.replace("model.layers.", "backbone.layers.").rpartition(".")
    if ".mixer." not in name:
        stem, _, suffix = name.rpartition(".")
    return stem, f".{suffix}"


def _taken_apart(tensors: Mapping[str, Numbers], arch: str) -> Iterator[tuple[str, Numbers]]:
    """Experts as one tensor for each of their three products."""
    sparse = any(".block_sparse_moe." in name for name in tensors)
    shared = ".mlp.shared_experts" if sparse else ".mlp"
    stacks: dict[str, dict[int, Numbers]] = {}
    for name, values in tensors.items():
        each = re.fullmatch(r"(.*\.(?:experts|norms))\.(\d+)(\.\w+)?\.weight", name)
        if each is not None:
            stem = each[1].removesuffix(".norms")
            if stem.endswith(".mixer.experts"):
                stem = stem.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
            if ".feed_forward." in stem and arch != "jamba":
                stem = stem.removeprefix("model.")
            stacks.setdefault(f"{stem}{each[3] or ''}.weight", {})[int(each[2])] = values
        elif arch in EXPERTS_OF and ".experts." in name:
            yield from EXPERTS_OF[arch](name, values)
        elif arch == "mistral4" and name.endswith("experts.gate_up_proj"):
            yield f"{name}.weight", values
        elif name.endswith(("experts.gate_up_proj", "input_linear.weight")):
            stem = re.sub(r"\.(gate_up_proj|input_linear\.weight)$", "", name)
            stem = stem.replace(".block_sparse_moe", ".mlp.experts")
            stem = stem.replace(".shared_mlp", shared)
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True):
                yield f"{stem}.{part}_proj.weight", half
        elif arch in LATENT and name.endswith("kv_b_proj.weight"):
            yield from _of_latents(name, values)
        elif arch == "qwen3next" and "in_proj_qkvz" in name:
            yield from _of_qkvz(name, values)
        else:
            own = name.replace(".block_sparse_moe.output_linear", ".mlp.experts.down_proj")
            own = own.replace(".shared_mlp.output_linear", f"{shared}.down_proj")
            # As they are published, of layers without experts.
            own = re.sub(r"\.block_sparse_moe\.(?=\w+_proj\.)", ".mlp.", own)
            yield (f"{own}.weight" if own.endswith("experts.down_proj") else own), values
    for name, parts in stacks.items():
        yield name, np.stack([parts[index] for index in sorted(parts)])


def _of_gpt_oss(name: str, values: Numbers) -> Iterator[tuple[str, Numbers]]:
    suffix = ".bias" if name.endswith("_bias") else ".weight"
    stem = name.removesuffix("_bias")
    values = values if suffix == ".bias" else values.swapaxes(1, 2)
    if "gate_up" in stem:
        yield stem.replace("gate_up", "gate") + suffix, values[:, ::2]
        yield stem.replace("gate_up", "up") + suffix, values[:, 1::2]
    else:
        yield stem + suffix, values


def _of_llama4(name: str, values: Numbers) -> Iterator[tuple[str, Numbers]]:
    """Outputs first."""
    values = values.swapaxes(1, 2)
    if name.endswith("down_proj"):
        yield f"{name}.weight", values
        return
    for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
        yield name.replace("gate_up", part) + ".weight", half


EXPERTS_OF = {"gpt-oss": _of_gpt_oss, "llama4": _of_llama4}
HEADS, NOPE, GATED = 4, 12, 96


def _of_latents(name: str, values: Numbers) -> Iterator[tuple[str, Numbers]]:
    """Keys, turned, and values, each by heads."""
    keys, rest = np.split(values.reshape(HEADS, -1, values.shape[1]), [NOPE], axis=1)
    yield name.replace("kv_b", "k_b"), keys.swapaxes(1, 2)
    yield name.replace("kv_b", "v_b"), rest


def multiplied(values: Numbers, target: str, config: Mapping[str, Any]) -> Numbers:
    """Falcon-H1's weights with their multipliers."""
    entering, gates = config["attention_in_multiplier"], config["mlp_multipliers"]
    factors = {
        "attn_q": entering,
        "attn_k": entering * config["key_multiplier"],
        "attn_v": entering,
        "attn_output": config["attention_out_multiplier"],
        "ssm_out": config["ssm_out_multiplier"],
        "ffn_gate": gates[0],
        "ffn_down": gates[1],
        "token_embd": config["embedding_multiplier"],
        "output": config["lm_head_multiplier"],
    }
    part = target.removesuffix(".weight").split(".")[-1]
    if part == "ssm_in":
        keys, heads = config["mamba_n_groups"] * config["mamba_d_state"], config["mamba_n_heads"]
        each = np.repeat(config["ssm_multipliers"], [GATED, GATED, keys, keys, heads])
        return (values * (config["ssm_in_multiplier"] * each)[:, None]).astype(np.float32)
    return values * np.float32(factors.get(part, 1.0))


GROUPS, KEY_DIM, VALUE_DIM, EACH = 1, 12, 20, 3


def _of_qkvz(name: str, values: Numbers) -> Iterator[tuple[str, Numbers]]:
    """By parts what is stored by groups, of sizes as the test has them."""
    sizes = np.cumsum([KEY_DIM, KEY_DIM, EACH * VALUE_DIM])
    grouped = values.reshape(GROUPS, -1, values.shape[1])
    parts = [part.reshape(-1, values.shape[1]) for part in np.split(grouped, sizes, axis=1)]
    yield name.replace("qkvz", "qkv"), np.concatenate(parts[:3])
    yield name.replace("qkvz", "z"), parts[3]


def _older(values: Numbers, target: str, arch: str, config: Mapping[str, Any]) -> Numbers:
    """GPT-NeoX's heads in turn become all queries, keys and values; GPT-2's weights are turned."""
    if arch == "gptneox" and "attn_qkv" in target:
        parts = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
        return parts.swapaxes(0, 1).reshape(values.shape)
    turned = arch == "gpt2" and values.ndim == 2 and target.startswith("blk.")
    return np.ascontiguousarray(values.T) if turned else values


def _changed(values: Numbers, target: str, arch: str, config: Mapping[str, Any]) -> Numbers:
    if arch in PAIRED and (".attn_q." in target or ".attn_k." in target):
        heads = config["num_attention_heads" if ".attn_q." in target else "num_key_value_heads"]
        return values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    if target.endswith("ssm_a"):
        values = -np.exp(values)
    if arch == "kimi-linear":
        return values.reshape(1, -1, 1, values.shape[-1]) if "_conv1d" in target else values
    if target.endswith(("ssm_a", "ssm_d")) and arch not in (*SHIFTED, "jamba", "mamba"):
        return values[:, None]
    if "ssm_norm" in target and arch not in SHIFTED:
        return values.reshape(config.get("mamba_n_groups", config.get("n_groups")), -1)
    if arch == "falcon-h1":
        values = multiplied(values, target, config)
    if ".conv" in target or "_conv1d" in target:
        values = values.squeeze(1) if values.ndim == 3 else values
    if arch in SHIFTED and target.endswith("norm.weight") and "ssm_norm" not in target:
        return values + np.float32(1)
    return _tiled(values, target, config) if arch in TILED else _older(values, target, arch, config)


def _tiled(values: Numbers, target: str, config: Mapping[str, Any]) -> Numbers:
    """Heads of values that take turns between groups."""
    heads, groups = config["linear_num_value_heads"], config["linear_num_key_heads"]
    keys = 2 * groups * config["linear_key_head_dim"]
    part = (target.split(".") + [""] * 2)[2]
    first = keys if part in ("attn_qkv", "ssm_conv1d") else 0
    axis = 1 if part == "ssm_out" else 0
    if part not in TURNING:
        return values
    order = np.arange(values.shape[axis] - first).reshape(groups, heads // groups, -1)
    order = np.concatenate((np.arange(first), first + order.swapaxes(0, 1).ravel()))
    return np.take(values, order, axis=axis)
