"""A model's part on one rank of several (tensor parallelism after Megatron-LM, arXiv 1909.08053): which rows
or columns of each tensor it reads, what the model is like there, and which models cannot be shared so.

A rank has some of the heads, some of the inner elements of each feed-forward and some of the vocabulary's
logits; the embedding, norms and all that is small are the same everywhere. Products that give heads or inner
elements are cut by outputs, so each output is computed as it is by one process; those that take them are cut
by inputs, and what the ranks get is added up. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from engine.model.spec import ModelSpec, TensorHeader
from kernels.ranks.shares import share_of

_BY_OUTPUTS = (".q_proj", ".k_proj", ".v_proj", ".gate_proj", ".up_proj")
_KEYS = (".k_proj.", ".v_proj.")
_BY_INPUTS = (".o_proj.weight", ".down_proj.weight")
# Added once, by the first rank.
_ADDED_ONCE = (".o_proj.bias", ".down_proj.bias")
_HEAD = "lm_head.weight"


class TensorPart(NamedTuple):
    """Elements [begin, end) of a tensor, of its first or of its second axis."""

    axis: int
    begin: int
    end: int


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One of `size` ranks, and what of the whole model it must know. Alone it has everything."""

    rank: int = 0
    size: int = 1
    num_kv_heads: int = 0
    vocab_size: int = 0

    @classmethod
    def of(cls, spec: ModelSpec, rank: int, size: int) -> Shard:
        """A rank of a model that `why_not_shared` says nothing against."""
        return cls(rank=rank, size=size, num_kv_heads=spec.num_kv_heads, vocab_size=spec.vocab_size)

    def model(self, spec: ModelSpec) -> ModelSpec:
        """What the whole model `spec` is on one rank; the same on each."""
        if self.size == 1:
            return spec
        return msgspec.structs.replace(
            spec,
            num_heads=spec.num_heads // self.size,
            num_kv_heads=max(1, spec.num_kv_heads // self.size),
            intermediate_size=spec.intermediate_size // self.size,
        )

    def vocabulary(self, vocab_size: int) -> slice:
        """The ids whose logits the rank computes."""
        return share_of(vocab_size, self.rank, self.size)

    def part_of(self, name: str, shape: tuple[int, ...]) -> TensorPart | None:
        """What the rank reads of a tensor of that shape; None where it reads all of it."""
        if self.size == 1:
            return None
        if name == _HEAD:
            return self._part(0, self.vocab_size)
        if name.endswith(_BY_INPUTS) and len(shape) == 2:
            return self._part(1, shape[1])
        if not name.rpartition(".")[0].endswith(_BY_OUTPUTS):
            return None
        if any(each in name for each in _KEYS) and self.num_kv_heads < self.size:
            # Several ranks have the same head.
            head, width = self.rank * self.num_kv_heads // self.size, shape[0] // self.num_kv_heads
            return TensorPart(0, head * width, (head + 1) * width)
        return self._part(0, shape[0])

    def _part(self, axis: int, count: int) -> TensorPart:
        share = share_of(count, self.rank, self.size)
        return TensorPart(axis, share.start, share.stop)

    def adds(self, name: str) -> bool:
        """Whether the rank adds what is in a tensor: biases of what is summed are added by one of them."""
        return not self.rank or not name.endswith(_ADDED_ONCE)

    def headers(self, headers: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
        """The same tensors as the rank reads them."""
        found = dict(headers)
        for name, header in headers.items():
            part = self.part_of(name, header.shape)
            if part is not None:
                shape = list(header.shape)
                shape[part.axis] = part.end - part.begin
                found[name] = msgspec.structs.replace(header, shape=tuple(shape))
        return found


WHOLE = Shard()


def why_not_shared(spec: ModelSpec, size: int) -> str:
    """Why a model cannot be shared among so many ranks; empty when it can. It ends with what helps."""
    found = next(_not_supported(spec), "")
    if found:
        return (
            f"{spec.architecture} has {found}, which ranks do not share yet; set it to 1, or engine.make to "
            "vllm with engine.vllm.tensor_parallel_size"
        )
    for name, count in (("heads", spec.num_heads), ("inner elements", spec.intermediate_size)):
        if count % size:
            return f"it does not divide the {count} {name} of {spec.architecture}; {_divisors(spec)}"
    kv_heads = spec.num_kv_heads
    if kv_heads % size and size % kv_heads:
        return (
            f"it neither divides nor is a multiple of the {kv_heads} heads of keys and values of "
            f"{spec.architecture}; {_divisors(spec)}"
        )
    return ""


def degrees(spec: ModelSpec, most: int) -> list[int]:
    """Numbers of ranks up to `most` that a model can be shared among."""
    return [size for size in range(1, most + 1) if size == 1 or not why_not_shared(spec, size)]


def _divisors(spec: ModelSpec) -> str:
    heads, inner, kv_heads = spec.num_heads, spec.intermediate_size, spec.num_kv_heads
    fitting = [
        str(size)
        for size in range(1, heads + 1)
        if not heads % size and not inner % size and (not kv_heads % size or not size % kv_heads)
    ]
    return f"set it to one of {', '.join(fitting)}"


def _not_supported(spec: ModelSpec) -> Iterator[str]:
    for has, what in (
        (spec.experts is not None, "experts"),
        (spec.latent is not None, "latent attention"),
        (spec.state is not None, "layers that carry a state"),
        (spec.pooling is not None or spec.bidirectional, "a pooled output"),
        (spec.per_layer is not None or spec.altup is not None, "a second embedding or several streams"),
        (spec.quantization is not None, "weights that are quantized in the checkpoint"),
        (bool(spec.layer_heads or spec.intermediate_sizes or spec.gate_cuts), "layers of different sizes"),
        (spec.attention_layers is not None or spec.feed_forward_layers is not None, "half layers"),
        (bool(spec.sliding_layers), "layers with a window beside layers without one"),
        (spec.fused_qkv != "none" or spec.fused_gate_up, "fused projections"),
        (spec.attention_gate or spec.attention_sinks, "gates or sinks of heads"),
        (spec.norms_all_heads, "norms over all heads together, or of each head's own"),
        (bool(spec.factors) or spec.inputs_first or spec.up_first, "weights in another order or scale"),
    ):
        if has:
            yield what
