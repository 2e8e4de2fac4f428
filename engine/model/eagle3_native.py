"""A head that drafts, as native programs: one that begins with hidden states of the target, and one that goes
on from the head's own; see `eagle3`. Who drafts (engine/runner/speculation/head) fills in what they take.

Shape letters: T tokens, E hidden size of the head, F of its target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.model.forward_batch import ForwardBatch
from engine.model.layer_spec import DraftHeadSpec
from engine.model.native_decoder import NativeDecoder
from engine.model.program_builder import ProgramBuilder
from engine.model.records import Attention, DraftHead, FeedForward, Floats, ModelRecord, Norm
from kernels.embedding.native import TABLE_TYPES, EmbeddingArgs
from kernels.host import address_of, empty
from kernels.native.library import NativeLibrary, Program
from kernels.paged_cache.native import Storage


class NativeDraftHead(NativeDecoder):
    """See Model. `forward` and `read` take up to `max_tokens` tokens."""

    def __init__(
        self,
        model: ModelRecord,
        library: NativeLibrary,
        *,
        num_threads: int,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        super().__init__(model, library, num_threads=num_threads, max_tokens=max_tokens, max_rows=max_rows)
        spec = model.spec.draft_head
        assert spec is not None, "read as a head"
        # What `read` begins with, [T, F] of each layer that is read.
        self.features = [empty((max_tokens, spec.target_size)) for _ in spec.layers_of(0)]
        self._reading = Program(library, [])

    def share_embedding(self, target: ModelRecord) -> None:
        """Reads the target's embedding where the head has none."""
        if not self.record.embedding.shape[0]:
            self.record.embedding, self.record.embedding_type = target.embedding, target.embedding_type

    def read(self, batch: ForwardBatch, caches: Sequence[Storage]) -> Floats:
        """Hidden states [T, E] of tokens, each with what lies in `features` of the one before it; fills
        `caches`. They stay valid until the next step.
        """
        self._prepare(batch, caches)
        self._reading.run(self.pool)
        return self._hidden[: int(batch.ragged.query_starts[-1])]

    def go_on(self, hidden: Floats, batch: ForwardBatch, caches: Sequence[Storage]) -> Floats:
        """The same of one token each, with hidden states [T, E] of the head itself."""
        self._prepare(batch, caches)
        self._hidden[: hidden.shape[0]] = hidden
        self._body_of_step().run(self.pool)
        return self._hidden[: hidden.shape[0]]

    def _prepare(self, batch: ForwardBatch, caches: Sequence[Storage]) -> None:
        num_tokens = int(batch.ragged.query_starts[-1])
        assert num_tokens <= self._max_tokens, "asked for in parts"
        if self._body is None or self._caches is not caches:
            self._build_body(caches, self._max_tokens)
        self._point_to(batch, num_tokens)

    def _build_body(self, caches: Sequence[Storage], max_tokens: int) -> None:
        builder = ProgramBuilder(self.model, self.library, self._step, max_tokens, self.num_threads)
        head = self.model.draft_head
        assert isinstance(head, DraftHead), "read as a head"
        for number, (linear, rows) in enumerate(zip(head.fusion, self.features, strict=True)):
            builder.product(linear, rows, builder.stream, number > 0)
        num_fused = len(builder.ops)
        self._add_layer(builder, caches[0])
        self._reading = Program(self.library, builder.ops)
        self._body = self._adapted = Program(self.library, builder.ops[num_fused:])
        self._hidden, self._caches = builder.stream, caches

    def _add_layer(self, builder: ProgramBuilder, cache: Any) -> None:
        """From the hidden states in the stream, and the step's tokens, to those of the head."""
        head, layer, spec = self.model.draft_head, self.model.layers[0], self.spec
        assert isinstance(head, DraftHead), "read as a head"
        assert isinstance(spec.draft_head, DraftHeadSpec), "as above"
        attention, fed = layer.attention, layer.feed_forward
        assert isinstance(attention, Attention), "of a decoder's layer"
        assert isinstance(fed, FeedForward), "as above"
        tokens = self._embed(builder, layer.before[0])
        if spec.draft_head.norm_before_residual:
            builder.norm_stream(head.hidden_norm)
            x = builder.stream
        else:
            x = builder.norm(head.hidden_norm, "normed")
        qkv = builder.buffer("qkv", sum(attention.sizes))
        mixed = builder.buffer("mixed", attention.sizes[0])
        builder.product(head.token_qkv, tokens, qkv, False)
        builder.product(attention.qkv, x, qkv, True)
        builder.attend_own(attention, cache, qkv, mixed)
        builder.product(attention.output, mixed, builder.stream, True)
        builder.half(layer.before[1], None, lambda x, out, join: builder.feed_forward(fed, x, out, join))
        builder.finish()

    def _embed(self, builder: ProgramBuilder, norm: Norm | None) -> Floats:
        """The tokens' normed embeddings [T, E]."""
        model, width = self.model, self.spec.hidden_size
        assert norm is not None, "every head has it"
        tokens = builder.buffer("tokens", width)
        args = EmbeddingArgs(
            builder.step,
            address_of(model.embedding),
            address_of(tokens),
            width,
            TABLE_TYPES[model.embedding_type],
            model.embedding_scale,
            None,
        )
        builder.add("embedding", args, model.embedding)
        builder.norm_stream(norm, tokens)
        return tokens
