"""A layer that predicts further tokens, as native programs; see `mtp`, and `eagle3_native`, which says how
they are run.

Shape letters: T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.model.eagle3_native import NativeDraftHead
from engine.model.medusa_native import final_norm
from engine.model.native_decoder import NativeDecoder
from engine.model.program_builder import ProgramBuilder
from engine.model.records import Floats, ModelRecord, Predictor
from kernels.native.library import Program
from kernels.paged_cache.native import Storage


class NativePredictor(NativeDraftHead):
    """See NativeDraftHead."""

    def __init__(self, model: ModelRecord, target: NativeDecoder, *, max_tokens: int, max_rows: int) -> None:
        """`target` is the model that it drafts for, whose embedding and head are shared."""
        model.head = target.record.head
        model.spec = msgspec.structs.replace(model.spec, vocab_size=target.spec.vocab_size)
        super().__init__(
            model,
            target.library,
            num_threads=target.num_threads,
            max_tokens=max_tokens,
            max_rows=max_rows,
        )
        self._target_norm = final_norm(target.record)

    def _build_body(self, caches: Sequence[Storage], max_tokens: int) -> None:
        builder = ProgramBuilder(self.model, self.library, self._step, max_tokens, self.num_threads)
        head, own_norm, (features,) = self.model.draft_head, self.model.norm, self.features
        assert isinstance(head, Predictor), "read as such"
        assert own_norm is not None, "as above"
        # Both begin with hidden states behind a norm: the target's, or those that it left itself.
        builder.norm_stream(self._target_norm, features)
        self._take_in(builder, head, features)
        reading, builder.ops = builder.ops, []
        self._take_in(builder, head, builder.norm(own_norm, "normed"))
        going_on, builder.ops = builder.ops, []
        builder.product(head.token, self._embed(builder, head.token_norm), builder.stream, True)
        builder.layer(self.model.layers[0], caches[0])
        builder.finish()
        self._reading = Program(self.library, [*reading, *builder.ops])
        self._body = self._adapted = Program(self.library, [*going_on, *builder.ops])
        self._hidden, self._caches = builder.stream, caches

    @staticmethod
    def _take_in(builder: ProgramBuilder, head: Predictor, hidden: Floats) -> None:
        """Hidden states [T, E], which are written over, to the stream."""
        builder.norm_stream(head.hidden_norm, hidden)
        builder.product(head.hidden, hidden, builder.stream, False)
