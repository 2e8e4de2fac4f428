"""The counts that shares of a device's peak are made of, from a model's shapes."""

from __future__ import annotations

from collections import Counter

from engine.model.plan import PlanInput, make_plan
from engine.model.spec import ModelSpec
from engine.types import MemoryPlan
from engine.types.step import ModelWork

# Dense bfloat16 operations and bytes of memory a second, by data sheet, for names of devices that begin so
# after the maker's; the first that fits counts.
_DATA_SHEETS = {
    "H100 PCIe": (756e12, 2.0e12),
    "H100": (989e12, 3.35e12),
    "H200": (989e12, 4.8e12),
    "A100": (312e12, 2.0e12),
    "L40S": (362e12, 0.864e12),
    "L4": (121e12, 0.3e12),
    "A10": (125e12, 0.6e12),
}
_TERA, _GIGA = 1e12, 1e9


def work_of(given: PlanInput, plan: MemoryPlan, device_name: str = "") -> ModelWork:
    """Of a model under its plan, on a device that calls itself so."""
    spec, peak = given.whole, given.config.peak
    flop, read_bytes = _data_sheet(device_name)
    # Counts are the whole model's, whatever a rank has of it.
    multiplied = given.whole_num_weights or given.num_weights
    plans = [make_plan(stage) for stage in given.stages] or [plan]
    ranks = given.shard.degrees.stage_size
    if not spec.tied_embeddings or spec.pooling is not None:
        # Looked up, not multiplied; where they are tied the head is multiplied with them.
        multiplied -= spec.num_embeddings * spec.hidden_size
    if spec.per_layer is not None:
        multiplied -= spec.per_layer.num_embeddings * spec.num_layers * spec.per_layer.width
    if spec.experts is not None:
        idle = spec.experts.num_experts - spec.experts.num_active
        width = spec.experts.latent_size or spec.hidden_size
        per_expert = (3 if spec.gated else 2) * width * spec.experts.intermediate_size
        multiplied -= len(spec.experts.layers) * idle * per_expert
    return ModelWork(
        flop_per_token=2.0 * multiplied,
        flop_per_position=2.0 * _dims_per_position(spec),
        layers=tuple(Counter(map(spec.reach_of, spec.attending)).items()),
        weights_bytes=sum(each.weights_bytes for each in plans) * ranks,
        kv_bytes_per_token=sum(each.kv_bytes_per_token for each in plans) * ranks,
        peak_flop=peak.tflops * _TERA or flop,
        peak_read_bytes=peak.gbytes_per_s * _GIGA or read_bytes,
    )


def _dims_per_position(spec: ModelSpec) -> float:
    """Elements of queries and of values that all heads multiply at each position, the layers' average."""
    if spec.latent is not None:
        return float(spec.num_heads * (spec.query_key_dim + spec.value_dim))
    each = map(spec.heads_of, range(spec.num_layers))
    return sum(heads.num_heads * (heads.head_dim + heads.value_dim) for heads in each) / spec.num_layers


def _data_sheet(device_name: str) -> tuple[float, float]:
    name = device_name.removeprefix("NVIDIA ")
    return next((known for start, known in _DATA_SHEETS.items() if name.startswith(start)), (0.0, 0.0))
