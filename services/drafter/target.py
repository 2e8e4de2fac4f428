"""The model that a head is trained for, as it is served: its hidden states, and its distributions, over
lessons, computed by the native kernels.

Shape letters: T tokens of all lessons of a batch, E hidden size, R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config import EngineConfig, SchedulerConfig
from engine.config import num_threads as usual_threads
from engine.model.back_end import load_model, native_library
from engine.model.checkpoint import LoadRequest
from engine.model.draft_heads import why_no_head
from engine.model.forward_batch import ForwardBatch
from engine.model.layers import normed
from engine.model.loader import load_here
from engine.model.medusa_native import final_norm
from engine.model.native_decoder import NativeDecoder
from engine.model.plan import PlanInput, plan_input
from engine.model.program_builder import ProgramBuilder
from engine.model.spec import ModelSpec
from engine.runner.kv_storage import KvStorage
from kernels.attention.ragged import RaggedBatch
from kernels.host import HOST
from kernels.native.library import Program, StepStruct
from kernels.selection import torch_kernels
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from services.drafter.options import DrafterMethod

# Tokens of a block.
BLOCK_SIZE = 64
# Layers of which the third from the end is none of the first ones.
_DEEP = 10


class DraftedModel:
    """Computes up to `num_rows` lessons of up to `max_tokens` tokens each."""

    def __init__(
        self,
        model: Path,
        *,
        num_rows: int,
        max_tokens: int,
        num_threads: int,
        method: DrafterMethod = DrafterMethod.EAGLE3,
    ) -> None:
        """Raises ConfigError (CheckpointError) for a model that the native kernels do not serve."""
        config = EngineConfig(
            num_threads=num_threads or usual_threads(),
            scheduler=SchedulerConfig(max_num_batched_tokens=num_rows * max_tokens, max_num_seqs=1),
        )
        given = plan_input(config, ModelConfig(path=str(model)), device="cpu", available_bytes=1 << 40)
        self.spec: ModelSpec = given.spec
        if because := why_no_head(self.spec):
            raise ConfigError(f"{self.spec.architecture} {because}; no head is trained for it")
        self.model = load_natively(model, given, max_tokens)
        self.method = method
        self.layers = self.model.captured_layers = _LAYERS[method](self.spec.num_layers)
        self._storage = KvStorage(
            self.spec,
            num_blocks=num_rows * -(-max_tokens // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            kv_dtype=given.dtype,
            device=HOST,
        )

    def embedding(self) -> Tensor:
        """Rows of its embedding [V, E] in float32."""
        table, kind = self.model.record.embedding, self.model.record.embedding_type
        found = torch.from_numpy(np.array(table))
        return (found.view(torch.bfloat16) if kind == "bfloat16" else found).float()

    def head(self) -> tuple[Tensor, Tensor]:
        """What makes its logits of normed states, in float32: weight [V, E] and bias [V]. Both are asked of
        the product itself, by each unit vector and by zero, since its weight is packed.
        """
        model, size, step = self.model, self.spec.hidden_size, StepStruct()
        linear = model.record.head
        assert linear is not None, "it generates"
        builder = ProgramBuilder(model.record, model.library, step, size + 1, model.num_threads)
        logits = builder.buffer("logits", self.spec.vocab_size)
        builder.stream[:] = np.eye(size + 1, size)
        builder.product(linear, builder.stream, logits, False)
        step.num_tokens = size + 1
        Program(model.library, builder.ops).run(model.pool)
        rows = torch.from_numpy(logits)
        return (rows[:size] - rows[size]).T.contiguous(), rows[size].clone()

    def read(self, lessons: Sequence[Sequence[int]], rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Hidden states [T, 3 E] of lessons one after another, or [T, E] as the target's head reads them, and
        logits [R, V] behind some tokens.
        """
        hidden = self.model.forward(batch_of(lessons), self._storage.layers, None)
        states = np.concatenate([each[: hidden.shape[0]] for each in self.model.captured], axis=1)
        logits = torch.from_numpy(self.model.logits_of(hidden, rows).copy())
        found = torch.from_numpy(states)
        return found if self.method is DrafterMethod.EAGLE3 else self._normed(found), logits

    def _normed(self, hidden: Tensor) -> Tensor:
        """The final norm of hidden [T, E]."""
        norm = final_norm(self.model.record)
        bias = None if norm.bias is None else torch.from_numpy(norm.bias)
        held = replace(norm, weight=torch.from_numpy(norm.weight), bias=bias)
        return normed(held, hidden, torch_kernels())


def batch_of(lessons: Sequence[Sequence[int]]) -> ForwardBatch:
    """Lessons one after another as one step, each in blocks of its own, from the first block on."""
    lengths = np.array([len(ids) for ids in lessons], np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    within = np.arange(int(starts[-1])) - np.repeat(starts[:-1], lengths)
    counts = -(-lengths // BLOCK_SIZE)
    firsts = np.concatenate(([0], np.cumsum(counts)))[:-1]
    blocks = np.repeat(firsts, lengths) + within // BLOCK_SIZE
    return ForwardBatch(
        token_ids=np.concatenate([np.asarray(ids, np.int64) for ids in lessons]),
        positions=within,
        slots=blocks * BLOCK_SIZE + within % BLOCK_SIZE,
        ragged=RaggedBatch(
            query_starts=starts,
            context_lens=lengths,
            block_tables=firsts[:, None] + np.minimum(np.arange(counts.max()), counts[:, None] - 1),
            block_size=BLOCK_SIZE,
        ),
    )


def load_natively(folder: Path, given: PlanInput, max_tokens: int) -> NativeDecoder:
    """The model, by the native kernels. Raises ConfigError (CheckpointError)."""
    spec, config = given.spec, given.config
    library = native_library(config, spec, "cpu")
    if library is None:
        raise ConfigError(
            f"{spec.architecture}: what is trained reads hidden states of the native kernels, which do not "
            "compute this model here; see engine.native"
        )
    request = LoadRequest(
        folder=folder, spec=spec, dtype=given.dtype, max_model_len=max_tokens, config=config
    )
    loaded = load_model(
        request, device="cpu", library=library, progress=lambda stage, part: None, load=load_here
    )
    assert isinstance(loaded, NativeDecoder), "of the native library"
    return loaded


def _around(count: int) -> tuple[int, ...]:
    """The layers that EAGLE reads; of few layers the last one is read later."""
    return (min(2, count), count // 2, count - 3 if count >= _DEEP else count - 1)


_LAYERS: dict[DrafterMethod, Callable[[int], tuple[int, ...]]] = {
    DrafterMethod.EAGLE3: _around,
    DrafterMethod.MEDUSA: lambda count: (count,),
    DrafterMethod.MTP: lambda count: (count,),
}
"""The layers of so many whose inputs a head reads; beyond the last one is what that leaves."""
