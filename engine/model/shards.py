"""A model's part on one rank of several: which rows or columns of each tensor it reads, which experts, what
the model is like there, and which models cannot be shared so.

Tensor parallelism (after Megatron-LM, arXiv 1909.08053): a rank has some of the heads, some of the inner
elements of each feed-forward and some of the vocabulary's logits; the embedding, norms and all that is small
are the same everywhere. Products that give heads or inner elements are cut by outputs, so each output is
computed as it is by one process; those that take them are cut by inputs, and what the ranks get is added up.

Expert parallelism (after GShard, arXiv 2006.16668): a rank has some of the experts, whole, of every layer
that has experts.

Pipeline parallelism (after GPipe, arXiv 1811.06965): the ranks of a stage have a run of the layers, which are
numbered from 0 on in each stage; the first one has the embedding, too. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

import msgspec

from engine.model import state_shards
from engine.model.spec import ModelSpec, StateSpec, TensorHeader
from kernels.ranks.shares import Degrees, share_of

_BY_OUTPUTS = (
    *(".q_proj", ".k_proj", ".v_proj", ".q_b_proj", ".kv_b_proj", ".gate_proj", ".up_proj", ".w1", ".w3"),
)
_KEYS = (".k_proj.", ".v_proj.")
_BY_INPUTS = (".o_proj.weight", ".down_proj.weight", ".w2.weight")
# Gates, and behind them as many others.
_HALVES = ".gate_up_proj"
_STATE = ".state."
# Added once, by the first rank.
_ADDED_ONCE = (".o_proj.bias", ".down_proj.bias", state_shards.ADDED_ONCE)
_HEAD = "lm_head.weight"
# Names of experts' tensors; those of one expert have its number.
_EXPERTS = re.compile(r"\.experts\.(?:(\d+)\.)?")
_LAYERS = re.compile(r"^model\.layers\.(\d+)(?=\.)")
_EMBEDDING = "model.embed_tokens.weight"

Value = TypeVar("Value")


class TensorPart(NamedTuple):
    """Elements of a tensor, of its first or of its second axis: runs [begin, end) one behind another."""

    axis: int
    runs: tuple[tuple[int, int], ...]

    @property
    def slices(self) -> list[slice]:
        """The runs."""
        return [slice(begin, end) for begin, end in self.runs]

    @property
    def size(self) -> int:
        """Number of elements of that axis."""
        return sum(end - begin for begin, end in self.runs)


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One of several ranks, and what of the whole model it must know. Alone it has everything."""

    rank: int = 0
    degrees: Degrees = Degrees()
    num_kv_heads: int = 0
    vocab_size: int = 0
    state: StateSpec | None = None
    # The first layer of each stage, and the number of layers; empty where all have all.
    cuts: tuple[int, ...] = ()

    @classmethod
    def of(cls, spec: ModelSpec, rank: int, degrees: Degrees, layer_bytes: Sequence[int] = ()) -> Shard:
        """A rank of a model that `why_not_shared` says nothing against. Stages have layers of about as many
        bytes; of the same number where those are not given.
        """
        sizes = layer_bytes or (1,) * spec.num_layers
        return cls(
            rank=rank,
            degrees=degrees,
            num_kv_heads=spec.num_kv_heads,
            vocab_size=spec.vocab_size,
            state=spec.state,
            cuts=_cuts(sizes, degrees.pipeline) if degrees.pipeline > 1 else (),
        )

    @property
    def layers(self) -> range | None:
        """The layers of the whole model that the rank has, or parts of which; None where that is all."""
        stage = self.degrees.stage_of(self.rank)
        return range(*self.cuts[stage : stage + 2]) if self.cuts else None

    def of_layers(self, values: tuple[Value, ...]) -> tuple[Value, ...]:
        """Of values for each layer of the whole model, those of the rank's."""
        layers = self.layers
        return values if layers is None else values[layers.start : layers.stop]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.degrees.size

    def model(self, spec: ModelSpec) -> ModelSpec:
        """What the whole model `spec` is on one rank; the same on each of a stage. It routes among all
        experts.
        """
        if self.layers is not None:
            spec = _only(spec, self.layers)
        tensor, experts = self.degrees.tensor, spec.experts
        if experts is not None:
            experts = msgspec.structs.replace(
                experts,
                intermediate_size=experts.intermediate_size // self.degrees.expert_parts,
                shared_intermediate_size=experts.shared_intermediate_size // tensor,
            )
        return msgspec.structs.replace(
            spec,
            num_heads=spec.num_heads // tensor,
            num_kv_heads=max(1, spec.num_kv_heads // tensor),
            intermediate_size=spec.intermediate_size // tensor,
            experts=experts,
            state=None if spec.state is None else state_shards.of_rank(spec.state, tensor),
            factors=state_shards.factors_of_rank(spec.factors, spec.state, tensor),
        )

    def vocabulary(self, vocab_size: int) -> slice:
        """The ids whose logits the rank computes."""
        return share_of(vocab_size, self.rank, self.size)

    def held(self, num_experts: int) -> range:
        """The experts that the rank has, or parts of which."""
        held = self.degrees.held_by(self.rank, num_experts)
        return range(held.start, held.stop)

    def part_of(self, name: str, shape: tuple[int, ...]) -> TensorPart | None:
        """What the rank reads of a tensor of that shape; None where it reads all of it."""
        return None if self.size == 1 or not shape else self._cut(name, shape)

    def _cut(self, name: str, shape: tuple[int, ...]) -> TensorPart | None:
        if name == _HEAD:
            return self._part(0, self.vocab_size, self.rank, self.size)
        experts = _EXPERTS.search(name)
        if experts is not None and not experts[1]:
            # All experts in one tensor.
            return self._part(0, shape[0], self.degrees.group_of(self.rank), self.degrees.expert)
        rank, count = self.degrees.part_of(self.rank), self.degrees.tensor
        if experts is not None:
            rank, count = self.degrees.expert_part_of(self.rank), self.degrees.expert_parts
        if count == 1:
            return None
        if self.state is not None and _STATE in name:
            found = state_shards.cut(self.state, name, shape, rank, count)
            return None if found is None else TensorPart(*found)
        return self._cut_of_heads(name, shape, rank, count)

    def _cut_of_heads(self, name: str, shape: tuple[int, ...], rank: int, count: int) -> TensorPart | None:
        """Of a tensor of attention or of a feed-forward."""
        if name.endswith(_BY_INPUTS) and len(shape) == 2:
            return self._part(1, shape[1], rank, count)
        stem = name.rpartition(".")[0]
        if stem.endswith(_HALVES):
            half = shape[0] // 2
            own = share_of(half, rank, count)
            return TensorPart(0, ((own.start, own.stop), (half + own.start, half + own.stop)))
        if not stem.endswith(_BY_OUTPUTS):
            return None
        if any(each in name for each in _KEYS) and count > max(1, self.num_kv_heads):
            # Several ranks have the same head.
            head, width = rank * self.num_kv_heads // count, shape[0] // self.num_kv_heads
            return TensorPart(0, ((head * width, (head + 1) * width),))
        return self._part(0, shape[0], rank, count)

    def _part(self, axis: int, size: int, rank: int, count: int) -> TensorPart | None:
        if count == 1:
            return None
        share = share_of(size, rank, count)
        return TensorPart(axis, ((share.start, share.stop),))

    def adds(self, name: str) -> bool:
        """Whether the rank adds what is in a tensor: biases of what is summed are added by one of them."""
        experts = _EXPERTS.search(name)
        part = self.degrees.part_of if experts is None else self.degrees.expert_part_of
        return not part(self.rank) or not name.endswith(_ADDED_ONCE)

    def tensors(self, headers: Mapping[str, TensorHeader], spec: ModelSpec) -> dict[str, TensorHeader]:
        """The tensors of which the rank reads all or a part, by the names of its own layers."""
        found = {}
        held = range(0) if spec.experts is None else self.held(spec.experts.num_experts)
        for name, header in headers.items():
            experts = _EXPERTS.search(name)
            if experts is not None and experts[1] and int(experts[1]) not in held:
                continue
            own = self._own_name(name, spec)
            if own:
                renamed = msgspec.structs.replace(header, stored_name=header.stored_name or name)
                found[own] = header if own == name else renamed
        return found

    def _own_name(self, name: str, spec: ModelSpec) -> str:
        """What the rank calls a tensor; empty where another stage has it."""
        layers, numbered = self.layers, _LAYERS.match(name)
        if layers is None:
            return name
        if numbered is not None:
            index = int(numbered[1])
            # What is behind the last layer belongs to nobody, which reading says.
            is_own = index in layers or (not layers.start and index >= self.cuts[-1])
            return f"model.layers.{index - layers.start}{name[numbered.end() :]}" if is_own else ""
        return name if name != _EMBEDDING or self.embeds(spec) else ""

    def headers(self, headers: Mapping[str, TensorHeader], spec: ModelSpec) -> dict[str, TensorHeader]:
        """The tensors that the rank reads, as it reads them."""
        found = self.tensors(headers, spec)
        for name, header in found.items():
            part = self.part_of(name, header.shape)
            if part is not None:
                shape = list(header.shape)
                shape[part.axis] = part.size
                found[name] = msgspec.structs.replace(header, shape=tuple(shape))
        return found

    def embeds(self, spec: ModelSpec) -> bool:
        """Whether the rank reads the embedding: to begin with it, or for a head that is a part of it."""
        return spec.tied_embeddings or not self.layers or not self.layers.start


def _cuts(sizes: Sequence[int], stages: int) -> tuple[int, ...]:
    """Where stages begin, and the end: next to where equal shares of all sizes would, none of them empty."""
    sums, cuts = [0, *accumulate(sizes)], [0]
    for stage in range(1, stages):
        share = sums[-1] * stage / stages
        possible = range(cuts[-1] + 1, len(sizes) - (stages - stage) + 1)
        cuts.append(min((abs(sums[layer] - share), layer) for layer in possible)[1])
    return (*cuts, len(sizes))


def _only(spec: ModelSpec, layers: range) -> ModelSpec:
    """A model of these layers alone; the others are before and behind it."""
    run = slice(layers.start, layers.stop)

    def own(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(layer - layers.start for layer in numbers if layer in layers)

    experts, state = spec.experts, spec.state
    if experts is not None:
        experts = msgspec.structs.replace(experts, layers=own(experts.layers))
    if state is not None:
        state = msgspec.structs.replace(state, layers=own(state.layers)) if own(state.layers) else None
    halves = (spec.attention_layers, spec.feed_forward_layers)
    attention, feed_forward = (None if each is None else own(each) for each in halves)
    return msgspec.structs.replace(
        spec,
        num_layers=len(layers),
        attention_layers=attention,
        feed_forward_layers=feed_forward,
        state=state,
        layer_heads=spec.layer_heads[run],
        intermediate_sizes=spec.intermediate_sizes[run],
        gate_cuts=spec.gate_cuts[run],
        rope_of_layer=spec.rope_of_layer[run],
        windows=spec.windows[run],
        chunks=spec.chunks[run],
        experts=experts,
    )


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to, if it does to one."""
    numbered = _LAYERS.match(name)
    return None if numbered is None else int(numbered[1])


WHOLE = Shard()


class Refusal(NamedTuple):
    """Why a model cannot be shared so: the degree at fault, and words that end with what helps."""

    degree: str
    reason: str


def why_not_shared(spec: ModelSpec, degrees: Degrees) -> Refusal | None:
    """Why a model cannot be shared among ranks by these degrees; None when it can."""
    degree = degrees.first_above_one
    vllm = "or engine.make to vllm with engine.vllm.tensor_parallel_size"
    found = next(_never_shared(spec), "")
    if found:
        return Refusal(
            degree, f"{spec.architecture} has {found}, which ranks do not share yet; set it to 1, {vllm}"
        )
    if degrees.expert > 1 and spec.experts is None:
        return Refusal("expert", f"{spec.architecture} has no experts; set it to 1")
    if degrees.tensor > 1:
        found = next(_never_cut(spec), "")
        if found:
            help_by = "engine.parallel.expert spreads experts alone" if spec.experts is not None else vllm[3:]
            reason = f"{spec.architecture} has {found}, which ranks do not share yet; set it to 1 ({help_by})"
            return Refusal("tensor", reason)
        reason = _why_not_cut(spec, degrees.tensor)
        if reason:
            return Refusal("tensor", f"{reason}; set it to {_one_of(spec, 'tensor', spec.num_heads)}")
    refused = None if spec.experts is None else _why_not_spread(spec, degrees)
    return refused or _why_not_staged(spec, degrees.pipeline)


def degrees_of(spec: ModelSpec, name: str, most: int) -> list[int]:
    """Values up to `most` that one of the degrees, named as in Degrees, may have for a model."""
    found = (Degrees(**{name: size}) for size in range(2, most + 1))
    return [1, *(each.size for each in found if why_not_shared(spec, each) is None)]


def _one_of(spec: ModelSpec, name: str, most: int) -> str:
    sizes = range(1, most + 1)
    fit = [size for size in sizes if not (_why_not_cut(spec, size) if name == "tensor" else most % size)]
    return f"one of {', '.join(map(str, fit))}"


def _why_not_cut(spec: ModelSpec, size: int) -> str:
    """Why layers are not cut into so many parts; empty when they are."""
    experts, inner = spec.experts, spec.intermediate_size
    if experts is not None and not experts.joins_dense and set(spec.feeding) <= set(experts.layers):
        inner = 0
    shared = 0 if experts is None else experts.shared_intermediate_size
    for name, count in (
        ("heads", spec.num_heads),
        ("inner elements", inner),
        ("shared inner elements", shared),
    ):
        if count % size:
            return f"it does not divide the {count} {name} of {spec.architecture}"
    kv_heads = spec.num_kv_heads
    if spec.latent is None and kv_heads % size and size % kv_heads:
        return (
            f"it neither divides nor is a multiple of the {kv_heads} heads of keys and values of "
            f"{spec.architecture}"
        )
    return "" if spec.state is None else state_shards.why_not_cut(spec.state, size, spec.architecture)


def _why_not_spread(spec: ModelSpec, degrees: Degrees) -> Refusal | None:
    """The same for experts."""
    experts, parts = spec.experts, degrees.expert_parts
    assert experts is not None, "called for models with experts"
    count, inner = experts.num_experts, experts.intermediate_size
    if count % degrees.expert:
        remedy = f"set it to {_one_of(spec, 'expert', count)}"
        return Refusal("expert", f"it does not divide the {count} experts of {spec.architecture}; {remedy}")
    if parts == 1:
        return None
    whole = f"engine.parallel.expert = {degrees.tensor} gives each rank whole experts"
    if experts.layout not in ("separate", "mixtral"):
        what = "stores gates with what they gate, so that its experts are not cut"
        return Refusal("tensor", f"{spec.architecture} {what}; {whole}")
    if inner % parts:
        what = f"{parts} ranks do not divide the {inner} inner elements of an expert of {spec.architecture}"
        return Refusal("tensor", f"{what}; {whole}")
    return None


def _why_not_staged(spec: ModelSpec, stages: int) -> Refusal | None:
    """The same for runs of layers."""
    found = next(_never_staged(spec), "") if stages > 1 else ""
    if found:
        return Refusal("pipeline", f"{spec.architecture} has {found}, which stages have not yet; set it to 1")
    if stages > spec.num_layers:
        what = f"each stage has a layer at least, and {spec.architecture} has {spec.num_layers}"
        return Refusal("pipeline", f"{what}; set it to {spec.num_layers} or less")
    return None


def _never_shared(spec: ModelSpec) -> Iterator[str]:
    """What no rank behind the first is told of, or reads."""
    for has, what in (
        (spec.pooling is not None or spec.bidirectional, "a pooled output"),
        (spec.per_layer is not None or spec.altup is not None, "a second embedding or several streams"),
        (spec.inputs_first, "weights in another order"),
        (spec.shared_block is not None, "blocks that layers share"),
    ):
        if has:
            yield what


def _never_cut(spec: ModelSpec) -> Iterator[str]:
    """What layers must not have that are cut."""
    for has, what in (
        (
            spec.quantization is not None and spec.quantization.method != "gguf",
            "weights that are quantized in the checkpoint",
        ),
        (bool(spec.layer_heads or spec.intermediate_sizes or spec.gate_cuts), "layers of different sizes"),
        (spec.fused_qkv != "none", "fused projections"),
        (spec.attention_sinks, "sinks of heads"),
        (spec.norms_all_heads, "norms over all heads together, or of each head's own"),
        (spec.up_first, "weights in another order"),
        (spec.state is not None and not state_shards.is_cut(spec.state), "states that are not cut by heads"),
    ):
        if has:
            yield what


def _never_staged(spec: ModelSpec) -> Iterator[str]:
    """What layers must not have of which a stage has some."""
    for has, what in (
        (any(each.cache_of is not None for each in spec.layer_heads), "layers that read others' keys"),
        (spec.norm_placement == "sum", "norms that take the stream's place"),
    ):
        if has:
            yield what
