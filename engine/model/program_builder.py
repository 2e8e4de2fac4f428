"""The layers of a decoder as native ops, half layer by half layer.

Shape letters: T tokens, E hidden size, H query heads, I and M inputs and outputs of a head's product.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

from engine.model.altup_ops import StreamBuffers, advance, gather, spread
from engine.model.joined_ops import feed_joined
from engine.model.own_keys import OwnKeys
from engine.model.per_layer_ops import add_input, read_rows
from engine.model.rank_meetings import Meetings
from engine.model.records import (
    Attention,
    FeedForward,
    Floats,
    JoinedFeedForward,
    JointMixer,
    LatentAttention,
    Layer,
    Linear,
    Mixer,
    ModelRecord,
    Norm,
    SparseFeedForward,
)
from engine.model.spec import INNER_NORM_EPS
from engine.model.state_builder import STATE_OPS, add_gate, add_head_gates
from kernels.activation.native import KINDS, ActivationArgs
from kernels.adapters.native import NativeChanges
from kernels.altup.native import CutOffArgs
from kernels.attention.native_ops import AttentionArgs, AttentionPlanArgs, NativeAttentionPlan
from kernels.embedding.native import TABLE_TYPES, EmbeddingArgs
from kernels.experts.native import ExpertBuffers, SparseLayer, sparse_ops
from kernels.host import Values, address_of, empty, row_stride
from kernels.linear.packed import gemm_args, make_workspace, product_ops
from kernels.native.library import NativeLibrary, Op, StepStruct
from kernels.norm.native import NormArgs, norm_op
from kernels.paged_cache.native import CopySlotsArgs, Storage, describe
from kernels.ranks.native import Ranks
from kernels.rope.native import QK_NORMS, VALUE_KINDS, HeadProductArgs, LatentCacheArgs, RopeCacheArgs

NUM_TOKENS = StepStruct.num_tokens.offset


class ProgramBuilder:
    """Appends ops layer by layer. `stream` [T, E] is the residual stream."""

    def __init__(
        self,
        model: ModelRecord,
        library: NativeLibrary,
        step: ctypes.Structure,
        max_tokens: int,
        num_threads: int,
        *,
        window_step: ctypes.Structure | None = None,
        ranks: Ranks | None = None,
        copies_slots: bool = False,
    ) -> None:
        """`window_step` is `step` for layers with a window, where these keep blocks of their own. `ranks`:
        those that the model is shared among. `copies_slots`: steps may copy slots of the cache.
        """
        self.model, self.spec, self.library = model, model.spec, library
        self.step = ctypes.addressof(step)
        self._window_step = self.step if window_step is None else ctypes.addressof(window_step)
        self.ops: list[Op] = []
        self.ranks = ranks
        self._copies_slots = copies_slots
        self.own_keys = OwnKeys(library, copies_slots=copies_slots)
        self.meetings = None if ranks is None else Meetings(ranks)
        self.max_tokens = max_tokens
        self._buffers: dict[tuple[str, int], Floats] = {}
        self.stream = self.buffer("stream", model.spec.hidden_size)
        # A half layer's output that is normed before it joins the stream, and that norm.
        self.pending: Norm | None = None
        # What the stream is multiplied by when that joins it.
        self.gain = 1.0
        # What layers read of a second embedding.
        self.parts: Values | None = None
        # Where there is more than one.
        self.streams: StreamBuffers | None = None
        # Each thread converts few rows for itself, more of narrow ones: the widest need not take most room.
        widths = {linear.packed_parts[0].inputs for linear in model.linears()}
        rooms = [make_workspace(library, max_tokens, width, num_threads) for width in widths]
        self.workspace = max(rooms, key=lambda room: room.size)
        self.num_threads = num_threads
        changes = [linear.changes for linear in model.linears()]
        self.adapter_width = max((each.inner_width for each in changes if each is not None), default=0)
        # By heads of queries, of keys, and size of values; and those that are made for the step.
        self._plans: dict[tuple[int, int, int], NativeAttentionPlan] = {}
        self._planned: set[tuple[int, int, int]] = set()
        # Where votes for what is in a cache go, by its id.
        self.vote_rows: dict[int, int] = {}
        self.expert_buffers: ExpertBuffers | None = None

    def turn_to(self, step: ctypes.Structure) -> None:
        """Further ops compute this step, which has no window blocks, with the same buffers."""
        self.step = self._window_step = ctypes.addressof(step)
        self._planned.clear()

    def buffer(self, name: str, width: int) -> Floats:
        """[max_tokens, width] float32, the same for all layers that ask for that width."""
        if (name, width) not in self._buffers:
            self._buffers[name, width] = empty((self.max_tokens, width))
        return self._buffers[name, width]

    def add(self, name: str, args: ctypes.Structure, *keep: object) -> None:
        """Appends an op; `keep` is what its args point to."""
        self.ops.append(Op(self.library, name, args, *keep))

    def embed(self) -> None:
        """Token ids to the stream."""
        model = self.model
        args = EmbeddingArgs(
            self.step,
            address_of(model.embedding),
            address_of(self.stream),
            self.spec.hidden_size,
            TABLE_TYPES[model.embedding_type],
            model.embedding_scale,
            None if model.positions is None else address_of(model.positions),
        )
        self.add("embedding", args, model.embedding, model.positions)
        if model.per_layer is not None:
            self.parts = read_rows(self, model.per_layer)
        if model.embedding_norm is not None:
            self.norm_stream(model.embedding_norm)
        if model.stream_ends is not None:
            self.streams = spread(self, model.stream_ends)

    def mix(self, mixer: Mixer, cache: Any, x: Floats, out: Floats, join: bool) -> None:
        """Attention, or what is there in its place."""
        if isinstance(mixer, LatentAttention):
            self.latent_attention(mixer, cache, x, out, join)
        elif isinstance(mixer, JointMixer):
            self.mix(mixer.recurrence, cache.state, x, out, join)
            self.mix(mixer.attention, cache.keys, x, out, True)
        elif isinstance(mixer, Attention):
            self.attention(mixer, cache, x, out, join)
        else:
            STATE_OPS[type(mixer)](self, mixer, cache, x, out, join)

    def feed(
        self,
        feed_forward: FeedForward | SparseFeedForward | JoinedFeedForward,
        x: Floats,
        out: Floats,
        join: bool,
    ) -> None:
        """A feed-forward of any kind."""
        if isinstance(feed_forward, JoinedFeedForward):
            assert not join, "it has a norm behind it"
            feed_joined(self, feed_forward, x, out)
        elif isinstance(feed_forward, SparseFeedForward):
            self.sparse_feed_forward(feed_forward, x, out, join)
        else:
            self.feed_forward(feed_forward, x, out, join)

    def layer(self, layer: Layer, cache: Any) -> None:
        """Attention and feed-forward."""
        if self.streams is not None:
            advance(self, layer, cache, self.streams)
            return
        mixer, feed_forward = layer.attention, layer.feed_forward

        def attend(x: Floats, out: Floats, join: bool) -> None:
            assert mixer is not None, "only then it is called"
            self.mix(mixer, cache, x, out, join)

        def feed(x: Floats, out: Floats, join: bool) -> None:
            assert feed_forward is not None, "only then it is called"
            self.feed(feed_forward, x, out, join)

        if layer.of_sums:
            for compute, norm in zip((attend, feed), layer.after, strict=True):
                compute(self.stream, self.stream, True)
                if norm is not None:
                    self.norm_stream(norm)
            return
        if layer.parallel:
            first = self.enter(layer.before[0])
            second = first if layer.before[1] is None else self.norm(layer.before[1], "second_normed")
            attend(first, self.stream, True)
            feed(second, self.stream, True)
            return
        if mixer is not None:
            self.half(layer.before[0], layer.after[0], attend)
        if feed_forward is not None:
            self.half(layer.before[1], layer.after[1], feed)
        if layer.per_layer is not None:
            assert self.parts is not None, "read when the step began"
            add_input(self, layer.per_layer, self.parts, self.enter(None))
            self.pending = layer.after[2]
        assert layer.gain == 1.0 or self.pending is not None, "by the norm of what joins the stream"
        self.gain = layer.gain

    def half(
        self,
        before: Norm | None,
        after: Norm | None,
        compute: Callable[[Floats, Floats, bool], None],
    ) -> None:
        """One half layer: compute(input, output, whether the output is added to what is there)."""
        x = self.enter(before)
        if after is None:
            compute(x, self.stream, True)
        else:
            compute(x, self.buffer("change", self.spec.hidden_size), False)
            self.pending = after

    def enter(self, norm: Norm | None) -> Floats:
        """What a half layer computes upon; a pending change joins the stream on the way."""
        either = norm or self.pending
        if either is None:
            return self.stream
        change, args = self._joining(either, None if self.pending is None else self.stream)
        self.pending, self.gain = None, 1.0
        return self.norm(norm, "normed", args, change, either)

    def copy_stream(self, out: Floats) -> None:
        """out [T, E] = the stream with a pending change, which stays pending."""
        change, args = self._joining(self.pending, out)
        self.ops.append(norm_op(self.library, args, self.pending, change, out))

    def _joining(self, either: Norm | None, into: Floats | None) -> tuple[Floats | None, ctypes.Structure]:
        """The pending change, if there is one, and what lets it join the stream in `into`."""
        change = self.buffer("change", self.spec.hidden_size) if self.pending else None
        args = NormArgs(
            step=self.step,
            x=address_of(self.stream),
            change=_address(change),
            change_weight=None if self.pending is None else address_of(self.pending.weight),
            change_bias=None if self.pending is None else _address(self.pending.bias),
            residual=_address(into),
            gain=self.gain,
            width=self.spec.hidden_size,
            eps=0.0 if either is None else either.eps,
            centered=0 if either is None else int(either.centered),
        )
        return change, args

    def norm(
        self, norm: Norm | None, name: str, args: ctypes.Structure | None = None, *keep: object
    ) -> Floats:
        """The stream, or the norm of it in the buffer `name`; `args` may say what joins it before."""
        args = args or NormArgs(step=self.step, x=address_of(self.stream), width=self.spec.hidden_size)
        out = self.stream
        if norm is not None:
            out = self.buffer(name, self.spec.hidden_size)
            args.weight, args.bias, args.out = address_of(norm.weight), _address(norm.bias), address_of(out)
            args.eps, args.centered = norm.eps, int(norm.centered)
        self.ops.append(norm_op(self.library, args, norm, out, *keep))
        return out

    def norm_stream(self, norm: Norm, rows: Floats | None = None) -> None:
        """The norm of the stream, or of other rows [T, E], takes their place."""
        rows = self.stream if rows is None else rows
        args = NormArgs(
            step=self.step,
            x=address_of(rows),
            weight=address_of(norm.weight),
            bias=_address(norm.bias),
            out=address_of(rows),
            width=self.spec.hidden_size,
            eps=norm.eps,
            centered=int(norm.centered),
        )
        self.ops.append(norm_op(self.library, args, norm, rows))

    def add_rows(self, x: Floats, change: Floats, out: Floats) -> None:
        """out [T, E] = x + change, without any norm; out may be x."""
        args = NormArgs(
            step=self.step,
            x=address_of(x),
            change=address_of(change),
            residual=address_of(out),
            gain=1.0,
            width=self.spec.hidden_size,
        )
        self.ops.append(norm_op(self.library, args, x, change, out))

    def finish(self) -> None:
        """Lets the last change join the stream, and makes one of several."""
        self.enter(None)
        self.ops += self.own_keys.rest()
        if self.streams is not None and self.model.stream_ends is not None:
            gather(self, self.model.stream_ends, self.streams)

    def product(self, linear: Linear, x: Floats, out: Floats, join: bool) -> None:
        """out (+)= x W^T + b; x and out may be wider than the product."""
        begin = 0
        for weight in linear.packed_parts:
            args = gemm_args(
                weight,
                self.step + NUM_TOKENS,
                address_of(x),
                address_of(out[:, begin:]),
                address_of(self.workspace),
                x_stride=row_stride(x),
                out_stride=row_stride(out),
                accumulate=join,
            )
            self.ops.extend(product_ops(self.library, args, weight, x, out, self.workspace))
            begin += weight.outputs
        if linear.changes is not None:
            changes: NativeChanges = linear.changes
            # One width for all layers: an adapter of lower rank fills the beginning of the rows.
            inner = self.buffer("inner", self.adapter_width)
            self.ops += changes.ops(self.library, self.step, x, out, inner)

    def product_of_parts(self, linear: Linear, x: Floats, out: Floats, join: bool) -> None:
        """The same where each of several ranks has some of the inputs: what they get is added up."""
        if self.meetings is None or self.meetings.is_alone:
            self.product(linear, x, out, join)
            return
        part = self.meetings.part(self.max_tokens, self.spec.hidden_size)
        self.product(linear, x, part, False)
        self.ops.append(self.meetings.sum_op(self.step, out, join))

    def squares_of_parts(self, args: ctypes.Structure, among: int, *keep: object) -> Floats:
        """[T, 1]: sums of the squares that `args` (GatedRowArgs) say of as many ranks as `among`."""
        assert self.meetings is not None, "of several ranks"
        own, found = self.meetings.part(self.max_tokens, 1), self.buffer("squares", 1)
        args.squares = address_of(own)
        self.add("gated_squares", type(args).from_buffer_copy(args), *keep)
        self.ops.append(self.meetings.sum_op(self.step, found, False, among))
        return found

    def attention(self, attention: Attention, cache: Storage, x: Floats, out: Floats, join: bool) -> None:
        """Projections, rotation, cache write, attention, output."""
        width = sum(attention.sizes)
        qkv = self.buffer(self.own_keys.room(attention, cache), width + attention.num_gates)
        mixed = self.buffer("mixed", attention.mixed_size)
        self.product(attention.qkv, x, qkv, False)
        self.attend_own(attention, cache, qkv, mixed, x)
        if attention.num_gates:
            add_gate(self, mixed, qkv[:, width:], attention.gate_kind, attention.num_gates)
        self.product_of_parts(attention.output, mixed, out, join)

    def attend_own(
        self, attention: Attention, cache: Storage, qkv: Floats, mixed: Floats, x: Floats | None = None
    ) -> None:
        """Rotation, cache write and `attend`, of queries, keys and values that were projected from x."""
        self.rotate(attention, cache, qkv)
        self._copy_slots(cache)
        keys, ops, keep = self.own_keys.around(attention, cache, qkv, self._step_of(cache))
        self.ops += ops
        self.attend(attention, cache, attention.num_kv_heads, qkv, mixed, attention.sinks, x, keys)
        self.ops += keep

    def attend(
        self,
        attention: Attention | LatentAttention,
        cache: Storage,
        num_kv_heads: int,
        q: Floats,
        mixed: Floats,
        sinks: Values | None = None,
        x: Floats | None = None,
        keys: Floats | None = None,
    ) -> None:
        """mixed [T, H * value dim] of the queries that begin each row of q, made of x [T, E] as keys are."""
        plan = self._plan_of(attention.num_heads, num_kv_heads, mixed.shape[1], cache.block_size)
        options = attention.options
        args = AttentionArgs(
            step=self._step_of(cache),
            plan=plan.address,
            q=address_of(q),
            k=_address(keys),
            out=address_of(mixed),
            sinks=None if sinks is None else address_of(sinks),
            cache=describe(cache),
            num_heads=attention.num_heads,
            q_stride=row_stride(q),
            k_stride=0 if keys is None else row_stride(keys),
            out_stride=row_stride(mixed),
            window=options.window or 0,
            chunk=options.chunk or 0,
            scale=options.scale,
            soft_cap=options.soft_cap or 0.0,
            ahead=options.ahead,
            vote_row=self.vote_rows.get(id(cache), 0),
        )
        self.add("attention", args, attention, cache, q, x, keys, mixed)

    def _plan_of(self, num_heads: int, num_kv_heads: int, width: int, block_size: int) -> NativeAttentionPlan:
        """The plan of layers of a kind, whose heads have `width` elements together, made for the step."""
        kind = (num_heads, num_kv_heads, width // num_heads)
        if (plan := self._plans.get(kind)) is None:
            plan = self._plans[kind] = NativeAttentionPlan(
                self.library,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                value_dim=kind[2],
                block_size=block_size,
            )
        if kind not in self._planned:
            self._planned.add(kind)
            ahead = max(map(self.spec.ahead, range(self.spec.num_layers)))
            self.add("attention_plan", AttentionPlanArgs(self.step, plan.address, ahead), plan)
        return plan

    def _copy_slots(self, cache: Storage) -> None:
        """Copies the step's slots, where a step may have such, behind what it writes itself."""
        if self._copies_slots:
            self.add("copy_slots", CopySlotsArgs(self._step_of(cache), describe(cache)), cache)

    def _step_of(self, cache: Storage) -> int:
        """Where the step lies that says where a layer's blocks are."""
        return self._window_step if cache.in_windows else self.step

    def rotate(self, attention: Attention, cache: Storage, qkv: Floats) -> None:
        """Norms of queries and keys, rotation, and the write to the cache."""
        cos, sin = self.model.ropes[attention.rope]
        norm, scales = attention.q_norm, self.model.query_scales[attention.rope]
        args = RopeCacheArgs(
            step=self._step_of(cache),
            qkv=address_of(qkv),
            q_norm=None if norm is None else address_of(norm.weight),
            k_norm=None if attention.k_norm is None else address_of(attention.k_norm.weight),
            cos=address_of(cos),
            sin=address_of(sin),
            cache=describe(cache),
            num_heads=attention.num_heads,
            rotary_dim=2 * cos.shape[1],
            interleaved=int(attention.interleaved),
            norm=QK_NORMS[attention.qk_norm],
            eps=0.0 if norm is None else norm.eps,
            norm_stride=0 if norm is None or norm.weight.ndim == 1 else norm.weight.shape[1],
            norm_centered=int(norm is not None and norm.centered),
            norm_last=int(attention.norm_last),
            q_scales=_address(scales),
            qkv_stride=row_stride(qkv),
            stores=int(attention.stores),
            value_kind=VALUE_KINDS[attention.value_kind],
            value_scale=0.0 if attention.value_scale == 1.0 else attention.value_scale,
        )
        self.add("rope_cache", args, attention, cos, sin, scales)

    def latent_attention(
        self, attention: LatentAttention, cache: Storage, x: Floats, out: Floats, join: bool
    ) -> None:
        """Queries and one latent per token, both absorbed projections, attention over the latents, output."""
        latent, heads = attention.latent, attention.num_heads
        query_size, key_size = latent.nope_dim + latent.rope_dim, latent.kv_rank + latent.rope_dim
        q, down = self.buffer("q", heads * query_size), self.buffer("down", key_size)
        queries = self.buffer("queries", heads * key_size)
        mixed = self.buffer("mixed", heads * latent.kv_rank)
        values = self.buffer("values", heads * latent.value_dim)
        self.product(attention.query_up, self._query_input(attention, x), q, False)
        self.product(attention.down, x, down, False)
        (cos, sin), scales = self.model.ropes[attention.rope], self.model.query_scales[attention.rope]
        args = LatentCacheArgs(
            step=self._step_of(cache),
            down=address_of(down),
            latent_norm=address_of(attention.latent_norm),
            q=address_of(q),
            queries=address_of(queries),
            cos=address_of(cos),
            sin=address_of(sin),
            cache=describe(cache),
            num_heads=heads,
            nope_dim=latent.nope_dim,
            rotary_dim=latent.rope_dim,
            interleaved=int(attention.interleaved),
            eps=INNER_NORM_EPS,
            q_scales=_address(scales),
        )
        self.add("latent_cache", args, attention, cos, sin, scales)
        self._copy_slots(cache)
        self.head_product(q, attention.key_up, queries)
        self.attend(attention, cache, 1, queries, mixed)
        self.head_product(mixed, attention.value_up, values)
        add_head_gates(self, attention.gate, x, values)
        self.product_of_parts(attention.output, values, out, join)

    def _query_input(self, attention: LatentAttention, x: Floats) -> Floats:
        """x, or its normed projection to the rank of the queries."""
        if attention.query_down is None or attention.query_norm is None:
            return x
        rank = attention.latent.query_rank
        inner = self.buffer("query_latent", rank)
        self.product(attention.query_down, x, inner, False)
        args = NormArgs(
            step=self.step,
            x=address_of(inner),
            weight=address_of(attention.query_norm),
            out=address_of(inner),
            width=rank,
            eps=INNER_NORM_EPS,
        )
        self.ops.append(norm_op(self.library, args, attention, inner))
        return inner

    def head_product(self, x: Floats, weight: Values, out: Floats) -> None:
        """out[t, h, :M] = x[t, h, :I] weight[h]; weight [H, I, M], and rows of heads may be wider."""
        heads, inputs, outputs = weight.shape
        args = HeadProductArgs(
            step=self.step,
            x=address_of(x),
            weight=address_of(weight),
            out=address_of(out),
            num_heads=heads,
            inputs=inputs,
            outputs=outputs,
            x_stride=x.shape[1] // heads,
            out_stride=out.shape[1] // heads,
        )
        self.add("head_product", args, x, weight, out)

    def feed_forward(
        self, feed_forward: FeedForward, x: Floats, out: Floats, join: bool, gates: Floats | None = None
    ) -> None:
        """Gate and up, their activation in place, down; rows times the sigmoids of `gates` [T, 1]."""
        width = feed_forward.down.packed.inputs
        gate_up = self.buffer("gate_up", width if feed_forward.plain else 2 * width)
        self.product(feed_forward.gate_up, x, gate_up, False)
        if feed_forward.cut is not None:
            self.add("cut_off", CutOffArgs(self.step, address_of(gate_up), width, feed_forward.cut), gate_up)
        args = ActivationArgs(
            step=self.step,
            gate_up=address_of(gate_up),
            out=address_of(gate_up),
            width=width,
            out_stride=row_stride(gate_up),
            kind=KINDS[feed_forward.activation],
            plain=int(feed_forward.plain),
            coefficients=_address(feed_forward.coefficients),
            # The product behind is linear.
            gates=_address(gates),
        )
        self.add("activation", args, gate_up, feed_forward, gates)
        self.product_of_parts(feed_forward.down, gate_up, out, join)

    def sparse_feed_forward(
        self,
        feed_forward: SparseFeedForward,
        x: Floats,
        out: Floats,
        join: bool,
        asked: Floats | None = None,
    ) -> None:
        """The router's choice of experts, and the feed-forward that all tokens share; the router takes x, or
        what it is `asked`.
        """
        experts = feed_forward.spec
        if self.expert_buffers is None:
            self.expert_buffers = ExpertBuffers(
                self.library,
                experts,
                max_tokens=self.max_tokens,
                hidden_size=self.spec.hidden_size,
                width=experts.latent_size or self.spec.hidden_size,
                intermediate_size=experts.intermediate_size,
                num_threads=self.num_threads,
                plain=not self.spec.gated,
            )
        layer = SparseLayer(
            routing=experts,
            router=feed_forward.router.packed,
            gate_up=[expert.gate_up.packed_parts for expert in feed_forward.experts],
            down=[expert.down.packed for expert in feed_forward.experts],
            activation=feed_forward.activation,
            correction=feed_forward.correction,
            expert_scales=feed_forward.expert_scales,
            plain=feed_forward.experts[0].plain,
        )
        ops = partial(
            sparse_ops,
            *(self.library, layer, self.expert_buffers, self.step + NUM_TOKENS),
            apart=None
            if self.meetings is None
            else self.meetings.experts(self.step, experts.num_experts, feed_forward.places),
        )
        latent_in, latent_out = feed_forward.latent_in, feed_forward.latent_out
        if latent_in is None or latent_out is None:
            self.ops += ops(x, out, accumulate=join, asked=asked)
        else:
            taken, given = (self.buffer(name, experts.latent_size) for name in ("latent_in", "latent_out"))
            self.product(latent_in, x, taken, False)
            self.ops += ops(taken, given, accumulate=False, asked=x)
            self.product(latent_out, given, out, join)
        gates = None
        if feed_forward.shared_gate is not None:
            gates = self.buffer("shared_gates", 1)
            self.product(feed_forward.shared_gate, x, gates, False)
        if feed_forward.shared is not None:
            self.feed_forward(feed_forward.shared, x, out, True, gates)


def _address(values: Values | None) -> int | None:
    return None if values is None else address_of(values)
