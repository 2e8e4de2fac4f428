"""A loaded model as a program of native ops: one call computes a whole step.

The program is made once, for the largest step that its owner says there may be, and anew for what is larger;
what changes from step to step goes through one StepStruct. Activations are float32 and row-major in buffers
that all layers share. Families that cannot be lowered are named by `why_not_lowered` and served by torch.

Shape letters: T tokens, R rows whose logits are wanted, E hidden size, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from engine.model.expert_places import ExpertExchange
from engine.model.forward_batch import ForwardBatch
from engine.model.program_builder import ProgramBuilder
from engine.model.records import Attention, Floats, Linear, ModelRecord
from engine.model.spec import ModelSpec
from engine.model.stage_ops import add_forward
from engine.model.watched import StepWatcher
from kernels.activation.native import SoftCapArgs
from kernels.adapters.rows import AdapterRows
from kernels.altup.native import LARGEST_STREAMS
from kernels.attention.native_ops import vote_rows
from kernels.host import HOST, address_of, empty, row_stride
from kernels.linear.packed import gemm_args, make_workspace, product_ops
from kernels.native.library import NativeLibrary, Op, Program, StepStruct
from kernels.norm.native import NormArgs, norm_op
from kernels.paged_cache.host import BY_CHANNEL
from kernels.paged_cache.native import Storage
from kernels.ranks.native import FORWARD, LOGITS, Ranks
from kernels.recurrent.native import LARGEST_KEY

# The native cache ops shift by block sizes, and hold one head's vector at a time.
LARGEST_BLOCK = 256
LARGEST_HEAD = 1024
NUM_LOGIT_ROWS = StepStruct.num_logit_rows.offset


def why_not_lowered(spec: ModelSpec, *, block_size: int) -> str:
    """Why a model cannot run as a native program; empty when it can."""
    for has, what in (
        (spec.shared_block is not None, "layers share blocks that read the embedding, too"),
        (
            spec.latent is not None and spec.latent.indexer is not None,
            "an indexer chooses the positions that are attended to",
        ),
    ):
        if has:
            return what
    if spec.query_key_dim > LARGEST_HEAD:
        return f"heads of {spec.query_key_dim} elements are larger than {LARGEST_HEAD}"
    if spec.state is not None and spec.state.key_dim > LARGEST_KEY:
        return f"keys of {spec.state.key_dim} elements beside a state are larger than {LARGEST_KEY}"
    if spec.altup is not None and spec.altup.num_streams > LARGEST_STREAMS:
        return f"{spec.altup.num_streams} streams are more than {LARGEST_STREAMS}"
    if block_size & (block_size - 1) or block_size > LARGEST_BLOCK:
        return f"blocks of {block_size} tokens are not a power of two up to {LARGEST_BLOCK}"
    return ""


# What an op of attention keeps first: its layer and cache, queries, what they are made of, and own keys.
_Attended = tuple[Attention, Storage, Floats, Floats, Floats | None]


class NativeDecoder:
    """A model whose steps are native programs. Not thread-safe."""

    # Rows of a step are padded to a multiple of this.
    row_multiple = 1
    # Whether steps may copy slots of the cache, set before the first one.
    copies_slots = False
    # What has experts change ranks, set before the first step where they may.
    expert_exchange: ExpertExchange | None = None
    # A body, and the same in pieces.
    _pieces: tuple[Program, list[Program]] | None = None

    def __init__(
        self,
        model: ModelRecord,
        library: NativeLibrary,
        *,
        num_threads: int,
        max_tokens: int = 256,
        max_rows: int = 16,
        ranks: Ranks | None = None,
    ) -> None:
        """`ranks`: those that the model is shared among, of which this is one."""
        self.model = self.record = model
        self.ranks = ranks
        self.spec = model.spec
        self.max_model_len = model.max_model_len
        self.device = HOST
        self.library = library
        self.num_threads = num_threads
        self.pool = library.pool(num_threads)
        self._step = StepStruct()
        # The same for layers with a window, where these keep blocks of their own.
        self._window_step = StepStruct()
        self._head_step = StepStruct()
        self._caches: Sequence[Storage] | None = None
        self._max_tokens = max_tokens
        self._body: Program | None = None
        # The same with what adapters add, and copies of slots; and both by number of micro-batches.
        self._adapted: Program | None = None
        self._in_micro_batches: dict[int, tuple[Program, Program]] = {}
        self._adapter_rows: AdapterRows | None = None
        # The batch that the step points to; its arrays may change in place from one step to the next.
        self._batch: ForwardBatch | None = None
        self._hidden = empty((0, 0))
        # Layers whose inputs are kept for who drafts, set before the first step, and those of the latest step
        # [T, E] each. (Behind the last layer: what it leaves.)
        self.captured_layers: tuple[int, ...] = ()
        self.captured: list[Floats] = []
        # Body and head, and both as one program with the ops around them.
        self._joined: tuple[Program, Program, Program] | None = None
        self._head = Program(library, []) if model.head is None else self._build_head(max_rows)

    def wake(self) -> None:
        """A step follows shortly: the threads get up while it is prepared."""
        self.library.wake(self.pool)

    def forward(
        self, batch: ForwardBatch, caches: Sequence[Storage], attention: StepWatcher | None
    ) -> Floats:
        """Hidden states [T, E] of the step's tokens, before the final norm; fills `caches`, which are the
        same in every call. They stay valid until the next step. (The attention is the program's own; who is
        given in its place sees each layer's queries, and what these are computed from.)
        """
        ragged = batch.ragged
        num_tokens = int(ragged.query_starts[-1])
        if self._body is None or num_tokens > self._max_tokens or self._caches is not caches:
            self._build_body(caches, max(self._max_tokens, num_tokens))
        if batch is not self._batch:
            self._point_to(batch, num_tokens)
        if attention is None:
            self._body_of_step().run(self.pool)
        else:
            self._run_watched(attention, num_tokens)
        return self._hidden[:num_tokens]

    def _run_watched(self, watcher: StepWatcher, num_tokens: int) -> None:
        """The body in pieces, each of which ends where a layer's attention begins."""
        body = self._body_of_step()
        if self._pieces is None or self._pieces[0] is not body:
            cuts = [index for index, op in enumerate(body.ops) if op.name == "attention"]
            pairs = zip([0, *cuts], [*cuts, len(body.ops)], strict=True)
            self._pieces = body, [Program(self.library, body.ops[first:end]) for first, end in pairs]
        for piece in self._pieces[1]:
            op = piece.ops[0]
            if op.name == "attention":
                attention, cache, q, x, keys = cast("_Attended", op.keep[:5])
                if watcher.read is not None:
                    watcher.read(x[:num_tokens])
                queries = q[:num_tokens, : attention.sizes[0]].reshape(num_tokens, attention.num_heads, -1)
                own = None
                if keys is not None and cache.type_name == BY_CHANNEL:
                    own = keys[:num_tokens, : attention.num_kv_heads * queries.shape[2]]
                    own = own.reshape(num_tokens, attention.num_kv_heads, -1)
                watcher.watch(queries, cache, attention.options, own)
            piece.run(self.pool)

    def _body_of_step(self) -> Program:
        """The body for the step's rows: adapters and copies cost those nothing that have none."""
        bodies = self._body, self._adapted
        if self._in_micro_batches and self.ranks is not None:
            count = self.ranks.shape.num_micro_batches(self._step.num_tokens)
            bodies = self._in_micro_batches.get(count, bodies)
        body = bodies[bool(self._step.num_adapter_blocks or self._step.num_slot_copies)]
        assert body is not None, "forward comes first"
        return body

    def _point_to(self, batch: ForwardBatch, num_tokens: int) -> None:
        step, ragged = self._step, batch.ragged
        if self.ranks is not None:
            self.ranks.check(num_tokens, *ragged.block_tables.shape)
        step.num_tokens = num_tokens
        step.num_sequences = ragged.context_lens.size
        step.max_blocks = ragged.block_tables.shape[1]
        step.token_ids = address_of(batch.token_ids)
        step.positions = address_of(batch.positions)
        step.slots = address_of(batch.slots)
        step.query_starts = _address(ragged.query_starts)
        step.context_lens = _address(ragged.context_lens)
        step.block_tables = _address(ragged.block_tables)
        step.votes = None if ragged.votes is None else _address(ragged.votes)
        states = batch.states
        if states is not None:
            if self.ranks is not None:
                self.ranks.check_states(states)
            step.state_slots = _address(states.slots)
            step.snapshot_starts = _address(states.snapshot_starts)
            step.snapshot_rows = _address(states.snapshot_rows)
            step.snapshot_slots = _address(states.snapshot_slots)
        rows = batch.adapter_rows if batch.adapters is None else AdapterRows.of(batch.adapters)
        self._adapter_rows = rows
        step.num_adapter_blocks = 0
        if rows is not None:
            step.num_adapter_blocks = len(rows.blocks)
            step.adapter_rows, step.adapter_blocks = _address(rows.rows), _address(rows.blocks)
        step.num_slot_copies = 0
        if batch.slot_copies is not None:
            assert self.copies_slots, "said before the first step"
            step.num_slot_copies, step.slot_copies = len(batch.slot_copies), _address(batch.slot_copies)
            step.recent_copies = None if batch.recent_copies is None else _address(batch.recent_copies)
        step.recent_rows = None if batch.recent_rows is None else _address(batch.recent_rows)
        if batch.windows is not None:
            kept = self._window_step
            ctypes.memmove(ctypes.addressof(kept), ctypes.addressof(step), ctypes.sizeof(step))
            kept.slots = address_of(batch.windows.slots)
            kept.block_tables = _address(batch.windows.block_tables)
        self._batch = batch

    def point_to_rows(self, batch: ForwardBatch, rows: NDArray[np.int64]) -> Floats:
        """Lets `step_program` compute a batch of no more tokens and logit rows [R] than `forward` and
        `logits_of` were asked for before; returns where their logits [R, V] will be.
        """
        self._point_to(batch, int(batch.ragged.query_starts[-1]))
        self._head_norm.x = address_of(self._hidden)
        self._head_step.num_logit_rows = rows.size
        self._head_step.logit_rows = _address(rows)
        return self._logits[: rows.size]

    def step_program(self, first: Op, after: Sequence[Op]) -> Program:
        """`first`, then forward and logits of the rows pointed to, then the ops `after`. These ops are the
        same in every call.
        """
        body, joined = self._body_of_step(), self._joined
        if joined is None or joined[0] is not body or joined[1] is not self._head:
            program = Program(self.library, [first, *body.ops, *self._head.ops, *after])
            self._joined = joined = (body, self._head, program)
        return joined[2]

    def logits_of(self, hidden: Floats, rows: NDArray[np.int64]) -> Floats:
        """Logits [R, V] of some rows of hidden [T, E], valid until the next call."""
        if rows.size > self._logits.shape[0]:
            self._build_head(max(rows.size, 2 * self._logits.shape[0]))
        self._head_norm.x = address_of(hidden)
        self._head_step.num_logit_rows = rows.size
        self._head_step.logit_rows = _address(rows)
        self._head.run(self.pool)
        return self._logits[: rows.size]

    def _build_head(self, max_rows: int) -> Program:
        spec, library, step = self.spec, self.library, ctypes.addressof(self._head_step)
        if self.ranks is not None:
            self.ranks.check_rows(max_rows)
        normed = empty((max_rows, spec.hidden_size))
        logits = empty((max_rows, spec.vocab_size))
        norm, linear = self.model.norm, self.model.head
        assert norm is not None, "it generates"
        assert linear is not None, "as above"
        head_norm = NormArgs(
            step=step,
            weight=address_of(norm.weight),
            out=address_of(normed),
            width=spec.hidden_size,
            logit_rows=1,
            eps=norm.eps,
            centered=int(norm.centered),
            bias=None if norm.bias is None else address_of(norm.bias),
        )
        ops = self._handed_over(self._head_step, LOGITS)
        ops += [norm_op(library, head_norm, norm), *self._head_product(linear, normed, logits)]
        if spec.logit_soft_cap is not None and (self.ranks is None or self.ranks.leads):
            cap = SoftCapArgs(
                step=step, logits=address_of(logits), width=spec.vocab_size, cap=spec.logit_soft_cap
            )
            ops.append(Op(library, "soft_cap", cap))
        # Only here: where memory ends on the way, the program that was there keeps the buffers it writes to.
        self._logits, self._head_norm, self._head = logits, head_norm, Program(library, ops)
        return self._head

    def _head_product(self, linear: Linear, normed: Floats, logits: Floats) -> list[Op]:
        """normed [R, E] -> logits [R, V]: of several ranks each computes some columns."""
        library, step, ranks = self.library, ctypes.addressof(self._head_step), self.ranks
        whole = logits if ranks is None or ranks.leads else None
        own = logits if ranks is None else ranks.logits(whole)
        workspace = make_workspace(library, len(normed), self.spec.hidden_size, self.num_threads)
        args = gemm_args(
            linear.packed,
            step + NUM_LOGIT_ROWS,
            address_of(normed),
            address_of(own),
            address_of(workspace),
            out_stride=row_stride(own),
        )
        ops = product_ops(library, args, normed, workspace, own)
        return ops if ranks is None else [*ops, ranks.logits_op(step, whole)]

    def _handed_over(self, step: ctypes.Structure, kind: int) -> list[Op]:
        """What begins a program where other ranks compute the same."""
        ranks = self.ranks
        return [ranks.step_op(step, kind)] if ranks is not None and ranks.leads else []

    def _build_body(self, caches: Sequence[Storage], max_tokens: int) -> None:
        builder = ProgramBuilder(
            *(self.model, self.library, self._step, max_tokens, self.num_threads),
            window_step=self._window_step,
            ranks=self.ranks,
            copies_slots=self.copies_slots,
        )
        builder.vote_rows, _ = vote_rows(caches)
        builder.own_keys.know(caches)
        num_layers = len(self.model.layers)
        # What the last layer leaves stays in the stream.
        captured = [
            builder.stream if layer == num_layers else empty((max_tokens, self.spec.hidden_size))
            for layer in self.captured_layers
        ]

        def capture(index: int) -> None:
            for wanted, out in zip(self.captured_layers, captured, strict=True):
                if wanted == index:
                    builder.copy_stream(out)

        def add_layers() -> None:
            for index, (layer, cache) in enumerate(zip(self.model.layers, caches, strict=True)):
                capture(index)
                builder.layer(layer, cache)

        def add_body(num_micro_batches: int) -> None:
            builder.ops = self._handed_over(self._step, FORWARD)
            add_forward(builder, self._step, num_micro_batches, add_layers)

        ranks, in_micro_batches = self.ranks, {}
        for count in [] if ranks is None else ranks.shape.micro_batch_counts[1:]:
            add_body(count)
            in_micro_batches[count] = self._without_adapters(builder.ops), Program(self.library, builder.ops)
        add_body(1)
        if self.spec.pooling is not None and self.model.norm is not None:
            builder.norm_stream(self.model.norm)
        self._body, self._hidden = self._without_adapters(builder.ops), builder.stream
        if ranks is not None and ranks.last_stage:
            self._hidden = ranks.hidden(ranks.last_stage)
        self._adapted = Program(self.library, builder.ops)
        self._in_micro_batches, self._pieces = in_micro_batches, None
        self._caches, self._max_tokens, self.captured = caches, max_tokens, captured

    def _without_adapters(self, ops: Sequence[Op]) -> Program:
        """What steps without adapters or copies run, which leaves their operations out."""
        plain = [op for op in ops if not op.name.startswith(("adapter_", "copy_slots", "copy_recent"))]
        return Program(self.library, plain)


def _address(array: NDArray[np.int64]) -> int:
    assert array.dtype == np.int64
    assert array.flags.c_contiguous
    return int(array.ctypes.data)
