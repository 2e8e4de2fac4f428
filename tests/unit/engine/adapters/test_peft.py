"""What is not an adapter of this model is refused with the name of the field and the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.adapters.peft import Module, check_adapter
from engine.adapters.version import AdapterError, version_of

MODULES = {
    "model.layers.0.self_attn.q_proj": Module(6, 8),
    "model.layers.0.mlp.down_proj": Module(10, 6),
}
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def write(folder: Path, **config: Any) -> Path:
    rank = config.get("r", 4)
    random = np.random.default_rng(0)
    tensors = {
        f"base_model.model.{name}.lora_{part}.weight": random.standard_normal(shape).astype(np.float32)
        for name, module in MODULES.items()
        for part, shape in (("A", (rank, module.inputs)), ("B", (module.outputs, rank)))
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "base_model_name_or_path": "llama"} | config
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def change(name: str, *, to: Any = None, rename: str = "") -> Callable[[Path], None]:
    """Another tensor in the place of one; None takes it away."""

    def apply(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        found = tensors.pop(name)
        if to is not None or rename:
            tensors[rename or name] = found if to is None else to
        save_file(tensors, path)

    return apply


def cut_short(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-16])


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3': LORA alone"),
        ({"use_dora": True}, "use_dora = True .* use_dora = false"),
        ({"bias": "all"}, "bias = 'all'.* bias = 'none'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\] is not served; train without"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters .* experts do not"),
        ({"layer_replication": [[0, 4]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights = 'pissa.* converted to plain"),
        ({"r": 32}, "r = 32 of .* exceeds engine.adapters.max_rank = 16; raise that"),
        ({"rank_pattern": {"q_proj": 9}}, "says r = 9"),
        ({"rank_pattern": {"q_(": 9}}, "adapter_config.json: "),
        ({"r": "four"}, "adapter_config.json: .*int"),
    ],
)
def test_configurations_that_are_not_served(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    folder = write(tmp_path, **({"r": 4} | config if config.get("r") != "four" else {}))
    if config.get("r") == "four":
        (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterError, match=words):
        check_adapter(folder, MODULES, max_rank=16)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_short, "cut short: .* download it again"),
        (without("adapter_config.json"), "there is no adapter_config.json beside"),
        (without("adapter_model.safetensors"), "as safetensors"),
        (change(f"{Q}.lora_B.weight"), "q_proj: lora_B.weight is missing"),
        (
            change(f"{Q}.lora_A.weight", to=np.zeros((4, 7), np.float32)),
            r"shape \[4, 7\] where \[4, 6\] is needed: it was trained for llama, which is not this model",
        ),
        (change(f"{Q}.lora_A.weight", to=np.zeros((3, 6), np.float32)), "says r = 4"),
        (change(f"{Q}.lora_A.weight", to=np.zeros((4, 6), np.int8)), "dtype = I8; save it as one of F32"),
        (
            change(f"{Q}.lora_A.weight", rename="base_model.model.lm_head.weight"),
            "a head, perhaps of another vocabulary",
        ),
        (
            change(f"{Q}.lora_A.weight", rename=f"{Q}.lora_magnitude_vector"),
            "DoRA",
        ),
    ],
)
def test_files_that_are_not_served(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    folder = write(tmp_path)
    damage(folder)
    with pytest.raises(AdapterError, match=words):
        check_adapter(folder, MODULES, max_rank=16)


def test_other_files_than_those_that_were_checked_are_not_read(tmp_path: Path) -> None:
    file = check_adapter(write(tmp_path), MODULES, max_rank=16)
    config = tmp_path / "adapter_config.json"
    text = config.read_text()
    # The same files, written again.
    config.write_text(text)
    file.check_unchanged()
    config.write_text(text.replace("8", "9"))
    with pytest.raises(AdapterError, match="has changed since the adapter was added; add it again"):
        file.check_unchanged()
    config.unlink()
    with pytest.raises(AdapterError, match=r"has changed since the adapter was added .*; add it again"):
        file.check_unchanged()


def test_a_version_is_that_of_the_files_wherever_they_lie(tmp_path: Path) -> None:
    first = check_adapter(write(tmp_path), MODULES, max_rank=16).version
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert version_of(tmp_path / "copy") == first
    change(f"{Q}.lora_B.weight", to=np.zeros((8, 4), np.float32))(tmp_path / "copy")
    assert version_of(tmp_path / "copy") != first
    for folder in (
        tmp_path / "missing",
        Path("a\0b"),
        tmp_path / ("x" * 300),
        tmp_path / "adapter_config.json",
    ):
        with pytest.raises(AdapterError, match=r"give (the|a) folder"):
            version_of(folder)


def test_scale_and_rank_are_those_of_the_first_pattern(tmp_path: Path) -> None:
    folder = write(tmp_path, use_rslora=True, lora_alpha=6, alpha_pattern={"mlp.down_proj": 2})
    file = check_adapter(folder, MODULES, max_rank=16)
    stored = load_file(folder / "adapter_model.safetensors")
    for module, alpha in (("model.layers.0.self_attn.q_proj", 6), ("model.layers.0.mlp.down_proj", 2)):
        found = file.change_of(module)
        assert found is not None
        assert found.rank == 4
        np.testing.assert_array_equal(found.down, stored[f"base_model.model.{module}.lora_A.weight"])
        np.testing.assert_allclose(found.up, stored[f"base_model.model.{module}.lora_B.weight"] * alpha / 2)
    assert file.change_of("model.layers.1.self_attn.q_proj") is None


@pytest.mark.parametrize("layers", [None, [], 0, [0]])
def test_no_list_of_layers_means_all_of_them(tmp_path: Path, layers: int | list[int] | None) -> None:
    folder = write(tmp_path, target_modules=["q_proj", "down_proj"], layers_to_transform=layers)
    assert check_adapter(folder, MODULES, max_rank=16).tensors.keys() == MODULES.keys()
