"""What is wrong with a checkpoint is said by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.files import find
from engine.model.checkpoint import LoadRequest, read_headers
from engine.model.decoder import Decoder
from engine.model.families import read_spec
from engine.model.layers import multiply
from engine.model.reading import load_decoder
from engine.model.spec import CheckpointError
from engine.model.weights import Progress
from runtime.errors import ConfigError
from tests.unit.engine.checkpoints import edit_config, make_checkpoint


def load(folder: Path, dtype: str = "float32", progress: Progress = lambda phase, part: None) -> Decoder:
    request = LoadRequest(folder=folder, spec=read_spec(folder), dtype=dtype, max_model_len=64)
    return load_decoder(request, device=torch.device("cpu"), progress=progress)


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces (or with None removes) tensors; "__" in a name stands for "."."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for keyword, tensor in changes.items():
        name = keyword.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    rewrite(tmp_path, model__norm__weight=None)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*missing"):
        load(tmp_path)


def test_unexpected_tensor_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    rewrite(tmp_path, model__layers__0__mystery=torch.zeros(3))
    with pytest.raises(CheckpointError, match=r"unexpected.*model\.layers\.0\.mystery"):
        load(tmp_path)


def test_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    rewrite(tmp_path, model__norm__weight=torch.zeros(7))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[7\].*\[48\]"):
        load(tmp_path)


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    edit_config(tmp_path, architectures=["NovelForCausalLM"])
    with pytest.raises(
        CheckpointError, match=r"NovelForCausalLM is not supported; supported are .*LlamaForCausalLM"
    ):
        read_spec(tmp_path)


def test_the_nearest_architecture_and_another_engine_are_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    edit_config(tmp_path, architectures=["Exaone5ForCausalLM"])
    nearest = r"; nearest is Exaone4ForCausalLM; vLLM's engine may have it \(millrace up --engine vllm\)"
    with pytest.raises(CheckpointError, match=nearest):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_size", None), ("num_attention_heads", "four"), ("hidden_act", "sin")]
)
def test_bad_config_key_is_named(key: str, value: object, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    edit_config(tmp_path, **{key: value})
    with pytest.raises(CheckpointError, match=key):
        read_spec(tmp_path)


def test_unknown_rope_scaling_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    edit_config(tmp_path, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})
    with pytest.raises(CheckpointError, match="spiral"):
        load(tmp_path)


def test_truncated_file_is_an_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cut short"):
        read_headers(tmp_path)


def test_missing_folder_and_missing_weights_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        find(str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_spec(tmp_path)
    with pytest.raises(CheckpointError, match="safetensors"):
        read_headers(tmp_path)


def test_sharded_checkpoint_loads_the_same(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "whole", "llama")
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    whole, shards = load(tmp_path / "whole"), load(tmp_path / "shards")
    assert torch.equal(whole.embedding, shards.embedding)
    x = torch.randn(16, 48)
    whole_output, output = (each.layers[1].attention.output for each in (whole, shards))
    assert torch.equal(multiply(whole_output, x), multiply(output, x))
    index = tmp_path / "shards" / "model.safetensors.index.json"
    gone = json.loads(index.read_text())["weight_map"]["model.norm.weight"]
    (tmp_path / "shards" / gone).unlink()
    with pytest.raises(CheckpointError, match=gone):
        load(tmp_path / "shards")


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("served", ["bfloat16", "float32"])
def test_types_are_converted(stored: torch.dtype, served: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama")
    model.to(stored).save_pretrained(tmp_path)
    embedding = model.get_input_embeddings().weight.detach()
    assert torch.equal(load(tmp_path, served).embedding, embedding.to(getattr(torch, served)))


def test_progress_rises_to_one(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    seen: list[float] = []
    load(tmp_path, progress=lambda phase, part: seen.append(part))
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1.0)
