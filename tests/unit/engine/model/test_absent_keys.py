"""A key that a configuration leaves out means what it means to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers
from transformers.models.auto import modeling_auto

from engine.model.families import read_spec
from engine.model.spec import CheckpointError, ModelSpec
from tests.unit.engine.checkpoints import IN_WHOLES, SMALL
from tests.unit.engine.model.test_families import CASES
from tests.unit.engine.model.test_wholes import CASES as WHOLES

# Sizes, which tensors have to agree with; what all checkpoints say; and layers that are left out either way.
NOT_ASKED = {
    "architectures",
    "dtype",
    "eos_token_id",
    "intermediate_size",
    "model_type",
    "n_inner",
    "num_nextn_predict_layers",
    "text_config",
    "transformers_version",
    "vision_config",
}
# One of each family: what is absent is the same in all of its cases.
BY_FAMILY = {model_type: name for name, (model_type, _) in reversed(CASES.items())}


def _architecture(model_type: str, changes: dict[str, Any]) -> str:
    sees = "text_config" in changes or model_type in IN_WHOLES
    names = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        if sees
        else modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    found = names[model_type]
    return found if isinstance(found, str) else str(found[0])


def _read(folder: Path, values: dict[str, Any]) -> ModelSpec | str:
    """The spec, or why there is none."""
    (folder / "config.json").write_text(json.dumps(values))
    try:
        spec = read_spec(folder)
    except CheckpointError as error:
        return str(error)
    # Newer configurations say the length beside it once more.
    ropes = tuple(
        msgspec.structs.replace(
            rope,
            parameters={
                key: value for key, value in rope.parameters.items() if key != "max_position_embeddings"
            },
        )
        for rope in spec.ropes
    )
    return msgspec.structs.replace(spec, ropes=ropes)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in ("architectures", "model_type")}


def _compare(folder: Path, model_type: str, values: dict[str, Any], part: str = "") -> None:
    """Leaves out one key after the other, of the `part` of the configuration."""
    config = transformers.AutoConfig.for_model(model_type, **values)
    own = {"architectures": [_architecture(model_type, values)]}
    whole = json.loads(config.to_json_string()) | own
    assert isinstance(_read(folder, whole), ModelSpec)
    keys = whole[part] if part else whole
    for key in sorted(keys.keys() - NOT_ASKED):
        less = {each: value for each, value in keys.items() if each != key}
        less = whole | {part: less} if part else less
        try:
            theirs = type(config)(**_given(less)).to_json_string()
        except Exception:  # What it refuses, in many ways, is not asked.
            continue
        ours, expected = _read(folder, less), _read(folder, json.loads(theirs) | own)
        if isinstance(ours, ModelSpec) and isinstance(expected, ModelSpec):
            assert ours == expected, key


@pytest.mark.parametrize("name", BY_FAMILY.values())
def test_an_absent_key_means_what_it_means_to_transformers(name: str, tmp_path: Path) -> None:
    model_type, changes = CASES[name]
    _compare(tmp_path, model_type, changes if "text_config" in changes else SMALL | changes)


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_so_it_does_where_an_indexer_chooses(model_type: str, tmp_path: Path) -> None:
    _compare(tmp_path, model_type, SMALL | {"num_key_value_heads": 4, "num_hidden_layers": 4})


@pytest.mark.parametrize(
    "name", sorted(name for name, (_, changes) in WHOLES.items() if "text_config" in changes)
)
def test_so_it_does_in_the_text_model_of_a_whole(name: str, tmp_path: Path) -> None:
    model_type, changes = WHOLES[name]
    inner = SMALL | changes["text_config"]
    _compare(tmp_path, model_type, changes | {"text_config": inner}, part="text_config")
