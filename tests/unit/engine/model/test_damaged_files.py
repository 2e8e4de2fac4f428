"""Headers, indices and configurations that are damaged: a CheckpointError that names file, tensor or key."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from engine.model.checkpoint import read_headers
from engine.model.families import read_spec
from engine.model.spec import CheckpointError
from runtime.errors import ConfigError

GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 9,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}


def write(folder: Path, header: object, size: int = 24) -> None:
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": 3}, r"tensor a\.weight: Expected `str`.*\$\.dtype"),
        ({"shape": 5}, r"tensor a\.weight: .*\$\.shape"),
        ({"shape": [2, -3]}, r"tensor a\.weight: .*\$\.shape"),
        ({"shape": [2, 4]}, r"tensor a\.weight: data_offsets = \[0, 24\] .* F32 of shape \[2, 4\]"),
        ({"data_offsets": [0]}, r"tensor a\.weight: .*\$\.data_offsets"),
        ({"data_offsets": [24, 0]}, r"tensor a\.weight: data_offsets = \[24, 0\]"),
        ({"data_offsets": [-24, 0]}, r"tensor a\.weight: data_offsets = \[-24, 0\]"),
        ({"data_offsets": [24, 48]}, r"cut short: \d+ of \d+ bytes; copy or download it again"),
    ],
)
def test_a_damaged_entry_is_named(change: dict[str, object], message: str, tmp_path: Path) -> None:
    write(tmp_path, {"a.weight": GOOD})
    assert read_headers(tmp_path)["a.weight"].shape == (2, 3)
    write(tmp_path, {"a.weight": GOOD | change})
    with pytest.raises(CheckpointError, match=rf"model\.safetensors is not a whole .*{message}"):
        read_headers(tmp_path)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 8, b"\x01" + bytes(7) + b"3"])
def test_a_file_that_is_something_else_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole safetensors file"):
        read_headers(tmp_path)


def test_a_pointer_is_told_from_the_file(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (tmp_path / "model.safetensors").write_bytes(pointer)
    with pytest.raises(CheckpointError, match=r"pointer of Git LFS.*git lfs pull"):
        read_headers(tmp_path)


@pytest.mark.parametrize("index", ["[]", '{"weight_map": {}}', '{"weight_map": {"a": null}}', "{", "{}"])
def test_a_damaged_index_is_named(index: str, tmp_path: Path) -> None:
    write(tmp_path, {"a.weight": GOOD})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json is not a valid index"):
        read_headers(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 0}, "head_dim = 0 is not a number from 1"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0 is not"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0 is not"),
        ({"num_hidden_layers": 10**30}, r"num_hidden_layers = 10+ is not"),
        ({"hidden_size": -8}, "hidden_size = -8 is not"),
        ({"architectures": 3}, "architectures = 3 is not a list"),
    ],
)
def test_counts_that_no_model_has_are_named(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    assert read_spec(tmp_path).num_heads == 2
    path.write_text(json.dumps(CONFIG | change))
    with pytest.raises(CheckpointError, match=message):
        read_spec(tmp_path)
    path.write_text(json.dumps(CONFIG))
    for generation in ("[", '{"eos_token_id": "x"}', '{"eos_token_id": [-1]}'):
        (tmp_path / "generation_config.json").write_text(generation)
        with pytest.raises(ConfigError, match=r"generation_config\.json:"):
            read_spec(tmp_path)
    path.write_text("[3]")
    with pytest.raises(CheckpointError, match="holds no table of keys"):
        read_spec(tmp_path)
