"""What a checkpoint says about its quantization, checked before any tensor is read. No torch.

The source is `quantization_config` of config.json, or the file of its own that older tools wrote beside it.
Which layers are quantized is not taken from lists of exceptions but from the tensors that are there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from runtime.errors import ConfigError

Method = Literal["awq", "gptq", "compressed-tensors", "fp8", "mxfp4", "bitsandbytes", "modelopt", "gguf"]

# Types of stored weights that need no scale.
FLOAT_TYPES = frozenset({"F64", "F32", "F16", "BF16"})
# Files beside config.json in which older AutoGPTQ, AutoAWQ and Model Optimizer keep their settings.
OLDER_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
COMPRESSED_FORMATS = (
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
)
# Names of `actorder` in compressed-tensors, and those of them that store which group an input belongs to.
_STORED_ORDERS = (True, "group", "dynamic")
_ORDERS = (None, False, "weight", "static", *_STORED_ORDERS)


# Inputs that share a scale in what is quantized at load.
GROUP_SIZES = (128, 64, 32)


def group_size_for(inputs: int, wanted: int) -> int:
    """The largest group size up to `wanted` into which `inputs` fall; 0 when none does."""
    return next((size for size in GROUP_SIZES if size <= wanted and inputs % size == 0), 0)


class LayerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """What compressed-tensors says of some of the layers."""

    # Classes of layers, their names, or "re:" and a pattern that a name begins with.
    targets: tuple[str, ...]
    has_zero_points: bool
    has_order: bool


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """How the linear layers of a checkpoint are stored."""

    method: Method
    # Bits of a level; 0 where the tensors say it.
    bits: int = 0
    # GPTQ's first version stores zero points lowered by one.
    zero_point_offset: int = 0
    # Whether inputs are to be rounded to int8, too.
    int8_activations: bool = False
    # Outputs and inputs that share a scale, where scales are by blocks.
    block: tuple[int, int] = (128, 128)
    # Whether GPTQ's inputs belong to groups in an order of their own.
    has_order: bool = False
    # Whether groups of compressed-tensors' fp4 have powers of two for scales, and not e4m3.
    is_mxfp4: bool = False
    groups: tuple[LayerGroup, ...] = ()

    def group_of(self, name: str) -> LayerGroup | None:
        """The group of the layer `name`: one that names it goes before one that names its class."""
        for group in self.groups:
            for target in group.targets:
                if target == name or (target.startswith("re:") and re.match(target[3:], name)):
                    return group
        return next((group for group in self.groups if "Linear" in group.targets), None)

    def has_zero_points(self, name: str) -> bool:
        """Whether the layer `name` has them: one that no group names may be of any."""
        group = self.group_of(name)
        return any(each.has_zero_points for each in (self.groups if group is None else (group,)))


def read_scheme(config: Mapping[str, Any], source: str) -> Scheme | None:
    """The scheme of a checkpoint whose config.json holds `config`; None when it is not quantized.

    `source` is the path of config.json. Raises ConfigError naming the key whose value is not supported.
    """
    text = config.get("text_config")
    inside = text.get("quantization_config") if isinstance(text, Mapping) else None
    given = config.get("quantization_config") or inside or _older_settings(Path(source).parent)
    if not given:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(f"{source}: quantization_config = {given!r} is not a table of keys")
    keys = _Keys(given, source)
    method = keys.one_of("quant_method", tuple(_READERS))
    return _READERS[method](keys)


class _Keys:
    """Keys of `quantization_config`, with errors that name them."""

    def __init__(self, values: Mapping[str, Any], source: str, path: str = "quantization_config") -> None:
        self.values, self.source, self.path = values, source, path

    def one_of(self, key: str, supported: tuple[Any, ...], default: Any = None) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, str):
            value = value.lower()
        if value not in supported:
            raise self.refusal(key, value, f"supported are {', '.join(map(str, supported))}")
        return value

    def inside(self, key: str) -> _Keys:
        value = self.values.get(key)
        if not isinstance(value, Mapping):
            raise self.refusal(key, value, "a table is needed")
        return _Keys(value, self.source, f"{self.path}.{key}")

    def block(self, key: str) -> tuple[int, int]:
        value = self.values.get(key)
        if (
            not isinstance(value, list | tuple)
            or len(value) != 2
            or not all(isinstance(n, int) and n > 0 for n in value)
        ):
            raise self.refusal(key, value, "two numbers are needed: outputs and inputs of a block")
        return value[0], value[1]

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key) or ()
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise self.refusal(key, value, "a list of names is needed")
        for pattern in (each[3:] for each in value if each.startswith("re:")):
            try:
                re.compile(pattern)
            except re.error as error:
                raise self.refusal(key, value, f"{pattern!r} is no pattern: {error}") from error
        return tuple(value)

    def refusal(self, key: str, value: object, remedy: str) -> ConfigError:
        return ConfigError(f"{self.source}: {self.path}.{key} = {value!r} is not supported; {remedy}")


def _older_settings(folder: Path) -> dict[str, Any]:
    for name, method in OLDER_FILES.items():
        if (folder / name).is_file():
            try:
                values = json.loads((folder / name).read_text())
                values = values.get("quantization") or values
                renamed = {"bits": values.get("w_bit"), "group_size": values.get("q_group_size")}
                return {"quant_method": method, **{k: v for k, v in renamed.items() if v}, **values}
            except (ValueError, AttributeError) as error:
                raise ConfigError(f"{folder / name} is not valid JSON of settings: {error}") from error
    return {}


def _awq(keys: _Keys) -> Scheme:
    keys.one_of("version", ("gemm",), keys.values.get("format", "gemm"))
    return Scheme(method="awq", bits=keys.one_of("bits", (4,)))


def _gptq(keys: _Keys) -> Scheme:
    layout = keys.one_of("checkpoint_format", ("gptq", "gptq_v2"), keys.values.get("format", "gptq"))
    if keys.one_of("format", ("gptq", "gptq_v2"), layout) != layout:
        raise keys.refusal(
            "format", keys.values["format"], f"checkpoint_format says {layout!r}; leave one out"
        )
    offset = 1 if layout == "gptq" else 0
    bits, has_order = keys.one_of("bits", (4, 8)), keys.one_of("desc_act", (False, True), False)
    return Scheme(method="gptq", bits=bits, zero_point_offset=offset, has_order=has_order)


def _compressed(keys: _Keys) -> Scheme:
    form = keys.one_of("format", COMPRESSED_FORMATS, "dense")
    keys.one_of("quantization_status", ("compressed", "frozen"), "compressed")
    _refuse_transforms(keys)
    groups = keys.inside("config_groups")
    int8, blocks, found = [], (128, 128), []
    for name in groups.values:
        group = groups.inside(name)
        weights = group.inside("weights")
        kind = weights.one_of("type", ("int", "float"), "int")
        weights.one_of("num_bits", (4, 8))
        strategies = ("tensor", "channel", "group", "block", "tensor_group")
        weights.one_of("strategy", strategies, "tensor")
        symmetric = weights.one_of("symmetric", (True, False), True)
        order = weights.one_of("actorder", _ORDERS, None)
        found.append(
            LayerGroup(
                targets=group.texts("targets"),
                has_zero_points=kind == "int" and not symmetric,
                has_order=order in _STORED_ORDERS,
            )
        )
        if weights.values.get("block_structure"):
            blocks = weights.block("block_structure")
        if group.values.get("input_activations"):
            inputs = group.inside("input_activations")
            inputs.one_of("num_bits", (8, 4) if inputs.values.get("type") == "float" else (8,))
            # What is rounded to fp8 for a GPU's sake is computed in floating point here.
            int8.append(inputs.one_of("type", ("int", "float"), "int") == "int")
    rounds = bool(int8) and all(int8)
    return Scheme(
        method="compressed-tensors",
        int8_activations=rounds,
        block=blocks,
        is_mxfp4=form == "mxfp4-pack-quantized",
        groups=tuple(found),
    )


def _refuse_transforms(keys: _Keys) -> None:
    """Rotations that weights contain are nothing to compute; those of activations are not computed."""
    if not keys.values.get("transform_config"):
        return
    schemes = keys.inside("transform_config").inside("config_groups")
    for name in schemes.values:
        scheme = schemes.inside(name)
        applied = scheme.values.get("apply")
        for each in applied if isinstance(applied, list) else ():
            place = _Keys(each if isinstance(each, Mapping) else {}, keys.source, f"{scheme.path}.apply")
            place.one_of("location", ("weight_input", "weight_output"))


def _fp8(keys: _Keys) -> Scheme:
    keys.one_of("fmt", ("e4m3",), "e4m3")
    block = keys.block("weight_block_size") if keys.values.get("weight_block_size") else (128, 128)
    return Scheme(method="fp8", bits=8, block=block)


def _bitsandbytes(keys: _Keys) -> Scheme:
    keys.one_of("load_in_8bit", (False,), False)
    keys.one_of("load_in_4bit", (True,))
    keys.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    keys.one_of("bnb_4bit_quant_storage", ("uint8", "torch.uint8"), "uint8")
    return Scheme(method="bitsandbytes", bits=4)


def _modelopt(keys: _Keys) -> Scheme:
    algorithm = keys.one_of("quant_algo", ("nvfp4", "fp8"))
    return Scheme(method="modelopt", bits=4 if algorithm == "nvfp4" else 8)


_READERS: dict[str, Callable[[_Keys], Scheme]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "mxfp4": lambda _: Scheme(method="mxfp4", bits=4),
    "bitsandbytes": _bitsandbytes,
    "modelopt": _modelopt,
}
