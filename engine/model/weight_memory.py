"""Bytes that a checkpoint's tensors take once loaded, from their headers alone. No torch.

Tensors in floating point take the serving type. Quantized ones take what the formats of `kernels/linear` say:
levels as stored, scales and minima in float32. Where a header leaves two cases open (zero points may turn out
to be symmetric) the larger one counts.
"""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig
from engine.model.checkpoint import ELEMENT_BYTES
from engine.model.spec import ModelSpec, TensorHeader
from engine.quantization.scheme import FLOAT_TYPES, group_size_for

FLOAT_BYTES = 4
FP8_TYPES = frozenset({"F8_E4M3", "F8_E5M2"})
# Bytes of a weight in the types of GGUF that stay quantized: levels, and scale and minimum of groups of 32.
GGUF_BYTES = {"Q8_0": 1 + 4 / 32, "Q4_0": 0.5 + 4 / 32, "Q4_1": 0.5 + 8 / 32, "Q4_K": 0.5 + 8 / 32}
# Parts of names of dense weights that are no linear layers, or that need their precision.
NEVER_QUANTIZED = (
    *("embed_tokens.weight", "embed_positions.weight", "lm_head.weight"),
    *(
        ".gate.weight",
        ".router.weight",
        ".shared_experts_gate.weight",
        ".kv_b_proj.",
        "_norm.weight",
        ".conv1d.",
    ),
)
HEAD = "lm_head.weight"
POSITIONS = "model.embed_positions.weight"
# Parts of names of tensors with two dimensions that are looked up, or taken apart before they are multiplied.
NEVER_MULTIPLIED = (
    "embed_tokens.weight",
    "embed_positions.weight",
    "_bias",
    ".kv_b_proj.",
    ".sinks",
    ".conv1d.",
)


class WeightCount(msgspec.Struct, frozen=True, kw_only=True):
    """What is loaded. Sums with `+`."""

    # Elements that the model has, whatever they are stored in.
    num_weights: int = 0
    # Those of them that take the serving type.
    num_plain: int = 0
    # Those of the latter that are multiplied with, and no float16.
    num_multiplied: int = 0
    # Bytes of all that does not depend on the serving type.
    fixed_bytes: int = 0

    def __add__(self, other: WeightCount) -> WeightCount:
        names = self.__struct_fields__
        return WeightCount(**{name: getattr(self, name) + getattr(other, name) for name in names})


def count_weights(spec: ModelSpec, headers: dict[str, TensorHeader], config: EngineConfig) -> WeightCount:
    """The whole checkpoint under `config`."""
    total = WeightCount()
    for name, header in headers.items():
        if not (spec.tied_embeddings and name == HEAD):
            total += _count(name, header, spec, config)
    if spec.tied_embeddings and quantizes_head(config):
        # The embedding stays, and the head is an int8 copy of it.
        total += WeightCount(fixed_bytes=_int8_bytes(spec.vocab_size, spec.hidden_size))
    return total


def quantizes_head(config: EngineConfig) -> bool:
    """Whether the head is int8 of its own making."""
    return config.quantize != "off" and config.quantization.head == "int8"


def _count(name: str, header: TensorHeader, spec: ModelSpec, config: EngineConfig) -> WeightCount:
    elements = header.num_elements
    if header.dtype in GGUF_BYTES and not any(part in name for part in NEVER_QUANTIZED if part != HEAD):
        return WeightCount(num_weights=elements, fixed_bytes=int(elements * GGUF_BYTES[header.dtype]))
    if spec.quantization is not None and header.dtype not in FP8_TYPES:
        stored = _stored_bytes(name, header, spec.quantization.bits or 4)
        if stored is not None:
            return stored
    if header.dtype in ELEMENT_BYTES and header.dtype not in FLOAT_TYPES | FP8_TYPES:
        return WeightCount()
    if name == POSITIONS:
        # Added in float32.
        return WeightCount(num_weights=elements, fixed_bytes=FLOAT_BYTES * elements)
    fixed = _at_load_bytes(name, _outputs_first(header.shape, spec), config)
    if fixed is None:
        multiplied = len(header.shape) > 1 and header.dtype != "F16"
        multiplied = multiplied and not any(part in name for part in NEVER_MULTIPLIED)
        return WeightCount(
            num_weights=elements, num_plain=elements, num_multiplied=elements if multiplied else 0
        )
    return WeightCount(num_weights=elements, fixed_bytes=fixed)


def _stored_bytes(name: str, header: TensorHeader, bits: int) -> WeightCount | None:
    """A tensor of a quantized checkpoint, or None for one that is dense."""
    elements, per_word = header.num_elements, 32 // bits
    if header.dtype == "I8":
        return WeightCount(num_weights=elements, fixed_bytes=elements)
    # Suffix to (weights, bytes) for each stored element.
    sizes = {
        ".qweight": (per_word, 4),
        ".weight_packed": (per_word, 4),
        # Two fp4 in a byte become two int8.
        "_blocks": (2, 2),
        ".qzeros": (0, FLOAT_BYTES * per_word),
        ".weight_zero_point": (0, FLOAT_BYTES * per_word),
        ".g_idx": (0, 8),
        ".weight_g_idx": (0, 8),
        ".scales": (0, FLOAT_BYTES),
        "_scales": (0, FLOAT_BYTES),
        ".weight_scale": (0, FLOAT_BYTES),
        ".weight_scale_inv": (0, 0),
        ".input_scale": (0, 0),
        ".input_zero_point": (0, 0),
        ".weight_shape": (0, 0),
    }
    for suffix, (weights, size) in sizes.items():
        if name.endswith(suffix):
            return WeightCount(num_weights=weights * elements, fixed_bytes=size * elements)
    return None


def _outputs_first(shape: tuple[int, ...], spec: ModelSpec) -> tuple[int, ...]:
    """A linear layer's shape, or that of experts that share a tensor, with outputs before inputs."""
    stacked = spec.experts is not None and spec.experts.layout == "stacked"
    turned = spec.inputs_first if len(shape) == 2 else len(shape) == 3 and not stacked
    return (*shape[:-2], shape[-1], shape[-2]) if turned else shape


def _at_load_bytes(name: str, shape: tuple[int, ...], config: EngineConfig) -> int | None:
    """Bytes of a dense tensor that is quantized at load, or None when it stays dense."""
    if config.quantize == "off" or len(shape) < 2:
        return None
    if name == HEAD:
        return _int8_bytes(*shape) if quantizes_head(config) else None
    if name.endswith("_bias") or any(part in name for part in NEVER_QUANTIZED):
        return None
    count, outputs, inputs = (1, *shape) if len(shape) == 2 else shape
    if config.quantize != "int4":
        return count * (
            _int8_bytes(outputs, inputs) + (FLOAT_BYTES * inputs if config.quantize == "w8a8" else 0)
        )
    size = group_size_for(inputs, config.quantization.group_size)
    if not size:
        return None
    # Levels, and scale and minimum of each group.
    return count * outputs * inputs // 2 + 2 * FLOAT_BYTES * count * outputs * inputs // size


def _int8_bytes(outputs: int, inputs: int) -> int:
    return outputs * inputs + FLOAT_BYTES * outputs
