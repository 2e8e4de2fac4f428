"""Bytes that a checkpoint's tensors take once loaded, from their headers alone. No torch.

Tensors in floating point take the serving type. Quantized ones take what the formats of `kernels/linear` say:
levels as stored, scales and minima in float32. Where a header leaves two cases open (zero points may turn out
to be symmetric) the larger one counts.
"""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig
from engine.model.checkpoint import ELEMENT_BYTES
from engine.model.shards import layer_of
from engine.model.spec import ModelSpec, TensorHeader
from engine.quantization.scheme import FLOAT_TYPES, Scheme, group_size_for

FLOAT_BYTES = 4
FP8_TYPES = frozenset({"F8_E4M3", "F8_E5M2"})
# Outputs, and inputs, of the blocks of fp8 that products take as they are (kernels/linear/formats).
FP8_BLOCK = 128
# Bytes of a weight in the types of GGUF that stay quantized: levels, and scale and minimum of groups of 32.
# Where products take codes: codes, the factors of groups, scale and minimum of spans.
GGUF_BYTES = {"Q8_0": 1 + 4 / 32, "Q4_0": 0.5 + 4 / 32, "Q4_1": 0.5 + 8 / 32, "Q4_K": 0.5 + 8 / 32}
GGUF_BYTES["MXFP4"] = 1 + 4 / 32
CODED_BYTES = GGUF_BYTES | {
    "Q5_0": 0.625 + 4 / 32,
    "Q5_1": 0.625 + 8 / 32,
    "Q2_K": 0.25 + 2 / 16 + 8 / 256,
    "Q3_K": 0.375 + 1 / 16 + 4 / 256,
    "Q4_K": 0.5 + 2 / 32 + 8 / 256,
    "Q5_K": 0.625 + 2 / 32 + 8 / 256,
    "Q6_K": 0.75 + 1 / 16 + 4 / 256,
    "IQ4_NL": 0.5 + 4 / 32,
    "IQ4_XS": 0.5 + 1 / 32 + 4 / 256,
    "MXFP4": 0.5 + 1 / 32,
}
# Parts of names of dense weights that are no linear layers, or that need their precision.
NEVER_QUANTIZED = (
    *("embed_tokens.weight", "embed_positions.weight", "embed_tokens_per_layer.weight", "lm_head.weight"),
    *(".gate.weight", ".router.", ".shared_experts_gate.weight", ".kv_b_proj.", "_norm.weight", ".conv1d."),
)
HEAD = "lm_head.weight"
POSITIONS = "model.embed_positions.weight"
EMBEDDING = "model.embed_tokens.weight"
# Ends of names of products by heads.
KEPT_IN_FLOAT32 = (".input_gate_weight", ".recurrent_gate_weight", ".A_log")
# Parts of names of tensors with two dimensions that are looked up, or taken apart before they are multiplied.
NEVER_MULTIPLIED = (
    *("embed_tokens.weight", "embed_positions.weight", "embed_tokens_per_layer.weight"),
    *("_bias", ".kv_b_proj.", ".sinks", ".conv1d."),
)


class WeightCount(msgspec.Struct, frozen=True, kw_only=True):
    """What is loaded. Sums with `+`."""

    # Elements that the model has, whatever they are stored in.
    num_weights: int = 0
    # Those of them that take the serving type.
    num_plain: int = 0
    # Those of the latter that are multiplied with, and no float16.
    num_multiplied: int = 0
    # Bytes of the head where it is the embedding and keeps the codes that the checkpoint holds.
    tied_head_bytes: int = 0
    # Bytes of all that does not depend on the serving type.
    fixed_bytes: int = 0

    def __add__(self, other: WeightCount) -> WeightCount:
        names = self.__struct_fields__
        return WeightCount(**{name: getattr(self, name) + getattr(other, name) for name in names})


def count_weights(
    spec: ModelSpec, headers: dict[str, TensorHeader], config: EngineConfig, *, coded: bool = False
) -> WeightCount:
    """The whole checkpoint under `config`; with `coded`, products take codes of a few bits and fp8 so."""
    total = WeightCount()
    for name, header in headers.items():
        if not (spec.tied_embeddings and name == HEAD):
            total += _count(name, header, spec, config, coded)
    embedding = headers.get(EMBEDDING)
    if spec.tied_embeddings and coded and embedding is not None and embedding.dtype in CODED_BYTES:
        head = spec.vocab_size * spec.hidden_size * CODED_BYTES[embedding.dtype]
        total += WeightCount(tied_head_bytes=int(head))
    if spec.tied_embeddings and quantizes_head(config):
        # The embedding stays, and the head is an int8 copy of it.
        total += WeightCount(fixed_bytes=_int8_bytes(spec.vocab_size, spec.hidden_size))
    return total


def layer_bytes(headers: dict[str, TensorHeader], num_layers: int) -> list[int]:
    """Bytes of each layer as the checkpoint stores it."""
    found = [0] * num_layers
    for name, header in headers.items():
        layer = layer_of(name)
        if layer is not None and layer < num_layers:
            found[layer] += header.num_elements * ELEMENT_BYTES.get(header.dtype, 1)
    return found


class WeightForm(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of one form."""

    # A type of GGUF, a checkpoint's method, what is made at load, or "dense" (from another type).
    form: str
    # Of a weight in memory, with its scales; 0 for those of the serving type.
    bits: float
    num_weights: int


def weight_forms(
    spec: ModelSpec, headers: dict[str, TensorHeader], config: EngineConfig, *, coded: bool = False
) -> tuple[WeightForm, ...]:
    """What the weights of a checkpoint are held as, most of them first."""
    found: dict[str, list[int]] = {}
    made = config.quantize if spec.quantization is None else spec.quantization.method
    for name, header in headers.items():
        count = _count(name, header, spec, config, coded)
        form = header.dtype if header.dtype in CODED_BYTES else made
        if count.num_plain:
            is_other = header.dtype not in FLOAT_TYPES
            form = f"dense, from {header.dtype}" if is_other else "dense"
        totals = found.setdefault(form, [0, 0])
        totals[0] += count.num_weights
        totals[1] += count.fixed_bytes
    forms = [
        WeightForm(form=form, bits=round(8 * size / weights, 2), num_weights=weights)
        for form, (weights, size) in found.items()
        if weights
    ]
    return tuple(sorted(forms, key=lambda each: -each.num_weights))


def quantizes_head(config: EngineConfig) -> bool:
    """Whether the head is int8 of its own making."""
    return config.quantize != "off" and config.quantization.head == "int8"


def _count(
    name: str, header: TensorHeader, spec: ModelSpec, config: EngineConfig, coded: bool
) -> WeightCount:
    elements = header.num_elements
    gguf_bytes = CODED_BYTES if coded else GGUF_BYTES
    if header.dtype in gguf_bytes and not any(part in name for part in NEVER_QUANTIZED if part != HEAD):
        return WeightCount(num_weights=elements, fixed_bytes=int(elements * gguf_bytes[header.dtype]))
    if spec.quantization is not None:
        stored = _stored_bytes(name, header, spec.quantization, coded)
        if stored is not None:
            return stored
    if header.dtype in ELEMENT_BYTES and header.dtype not in FLOAT_TYPES | FP8_TYPES:
        return WeightCount()
    if name == POSITIONS or name.endswith(KEPT_IN_FLOAT32):
        # Computed in float32.
        return WeightCount(num_weights=elements, fixed_bytes=FLOAT_BYTES * elements)
    fixed = _at_load_bytes(name, _outputs_first(name, header.shape, spec), config)
    if fixed is None:
        multiplied = len(header.shape) > 1 and header.dtype != "F16"
        multiplied = multiplied and not any(part in name for part in NEVER_MULTIPLIED)
        return WeightCount(
            num_weights=elements, num_plain=elements, num_multiplied=elements if multiplied else 0
        )
    return WeightCount(num_weights=elements, fixed_bytes=fixed)


def _stored_bytes(name: str, header: TensorHeader, scheme: Scheme, coded: bool) -> WeightCount | None:
    """A tensor of a quantized checkpoint, or None for one that is dense."""
    elements, per_word = header.num_elements, 32 // (scheme.bits or 4)
    if header.dtype == "I8":
        return WeightCount(num_weights=elements, fixed_bytes=elements)
    if header.dtype in FP8_TYPES:
        return _fp8_bytes(name, header, scheme, coded)
    if scheme.method == "bitsandbytes" and ".weight." in name:
        return WeightCount(fixed_bytes=FLOAT_BYTES * elements if coded and name.endswith(".absmax") else 0)
    if header.dtype == "U8" and name.endswith((".weight", ".weight_packed")):
        # Two numbers of 4 bits; NVFP4 has a scale for each output.
        scales = 0 if scheme.method == "bitsandbytes" else FLOAT_BYTES * header.shape[0]
        held = {"fixed_bytes": elements + scales} if coded else {"num_plain": 2 * elements}
        if scheme.is_mxfp4 and not coded:
            # Each becomes an int8.
            held = {"fixed_bytes": 2 * elements}
        return WeightCount(num_weights=2 * elements, **held)
    # Suffix to (weights, bytes) for each stored element.
    sizes = {
        ".qweight": (per_word, 4),
        ".weight_packed": (per_word, 4),
        # Two fp4 in a byte; without codes they become two int8.
        "_blocks": (2, 1 if coded else 2),
        ".qzeros": (0, FLOAT_BYTES * per_word),
        ".weight_zero_point": (0, FLOAT_BYTES * per_word),
        ".g_idx": (0, 8),
        ".weight_g_idx": (0, 8),
        ".scales": (0, FLOAT_BYTES),
        "_scales": (0, 1 if coded else FLOAT_BYTES),
        ".weight_scale": (0, 1 if coded and header.dtype == "U8" else FLOAT_BYTES),
        ".weight_scale_inv": (0, 0),
        ".weight_scale_2": (0, 0),
        ".weight_global_scale": (0, 0),
        ".input_scale": (0, 0),
        ".input_global_scale": (0, 0),
        ".input_zero_point": (0, 0),
        ".weight_shape": (0, 0),
    }
    found = next((size for suffix, size in sizes.items() if name.endswith(suffix)), None)
    if found is None:
        return None
    weights, size = found
    return WeightCount(num_weights=weights * elements, fixed_bytes=size * elements)


def _fp8_bytes(name: str, header: TensorHeader, scheme: Scheme, coded: bool) -> WeightCount | None:
    """fp8 weights, or scales of fp4; None for what becomes dense."""
    elements = header.num_elements
    if name.endswith(".weight_scale"):
        return WeightCount(fixed_bytes=elements if coded else 0)
    if not coded or header.dtype != "F8_E4M3" or scheme.block != (FP8_BLOCK, FP8_BLOCK):
        return None
    # Those of outputs are tensors that count for themselves.
    scales = elements // FP8_BLOCK if scheme.method == "fp8" else 0
    return WeightCount(num_weights=elements, fixed_bytes=elements + FLOAT_BYTES * scales)


def _outputs_first(name: str, shape: tuple[int, ...], spec: ModelSpec) -> tuple[int, ...]:
    """A linear layer's shape, or that of experts that share a tensor, with outputs before inputs."""
    stacked = spec.experts is not None and spec.experts.layout == "stacked"
    turned = spec.inputs_first and name != HEAD if len(shape) == 2 else len(shape) == 3 and not stacked
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
