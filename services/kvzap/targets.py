"""What a scorer learns: how much each token of a text is looked at by the model when it repeats the text.

KVzip+ of the KVzap paper (arXiv 2601.07891), as `kvzap/data.py` of github.com/NVIDIA/kvpress computes it: a
model is given a text, is asked to repeat it, and does. The score of a token in a layer and kv head is the
largest weight that any query of the repetition gives to its key, times the length of what its value adds to
the stream, divided by the length of what the query was computed from. Targets are logarithms of that.

Shape letters: T tokens, N of the text, E hidden size, K kv heads, G queries of a kv head, D size of a key or
value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.config import EngineConfig, SchedulerConfig
from engine.config import num_threads as usual_threads
from engine.model.kv_memory import remembers_because
from engine.model.kv_scorer import config_of
from engine.model.plan import plan_input
from engine.model.program_builder import ProgramBuilder
from engine.model.records import Attention, Linear
from engine.runner.forgotten.keys import Floats
from engine.runner.forgotten.meter import keys_of
from engine.runner.kv_storage import KvStorage
from kernels.attention.ragged import AttentionOptions
from kernels.host import HOST
from kernels.native.library import Program, StepStruct
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from services.drafter.lessons import Lesson, LessonRow, LessonWriter
from services.drafter.target import BLOCK_SIZE, batch_of, load_natively
from tokenizer_svc.text.checkpoint import load_checkpoint

_ASK = "\n\nRepeat the previous context exactly."
_MARK = "[the text]"
# Of no weight: its logarithm is finite.
_LEAST = 1e-30

# What a layer computes upon [N, E], and its targets [N, K].
Learn = Callable[[int, Floats, NDArray[np.float64]], None]


class Repetition:
    """A text twice, as a conversation in which it is repeated."""

    def __init__(self, model: Path) -> None:
        self._writer = writer = LessonWriter(load_checkpoint(model))
        # With what the model's texts begin, which a conversation brings.
        self._special = writer.ids("", special=True)
        before, after = "", f"{_ASK}\n"
        if writer.has_template:
            asked = [{"role": "user", "content": f"{_MARK}{_ASK}"}]
            before, _, after = writer.render(LessonRow(), asked, asks=True).partition(_MARK)
            self._before, self._after = writer.ids(before), writer.ids(after)
        else:
            self._before, self._after = self._special[:1], writer.ids(after)

    @property
    def num_beside(self) -> int:
        """Tokens beside both texts."""
        return len(self._before) + len(self._after)

    def ids(self, lesson: Lesson) -> tuple[list[int], slice, slice]:
        """Tokens; where the text is, and where its repetition is."""
        pairs = zip(lesson.ids, self._special, strict=False)
        text = lesson.ids[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]
        first, again = len(self._before), self.num_beside + len(text)
        found = [*self._before, *text, *self._after, *text]
        return found, slice(first, first + len(text)), slice(again, again + len(text))


class RepeatingModel:
    """Computes repetitions of texts of up to `max_tokens` tokens, and what a scorer learns of them."""

    def __init__(self, model: Path, *, max_tokens: int, num_threads: int) -> None:
        """Raises ConfigError for a model whose answers can forget nothing, or that the native kernels do not
        serve.
        """
        self._repetition = Repetition(model)
        longest = 2 * max_tokens + self._repetition.num_beside
        config = EngineConfig(
            num_threads=num_threads or usual_threads(),
            scheduler=SchedulerConfig(max_num_batched_tokens=longest, max_num_seqs=1),
        )
        given = plan_input(config, ModelConfig(path=str(model)), device="cpu", available_bytes=1 << 40)
        self.spec = given.spec
        if because := remembers_because(self.spec):
            raise ConfigError(f"{self.spec.architecture}: {because}; no scorer is trained for it")
        if longest > given.max_model_len:
            most = (given.max_model_len - self._repetition.num_beside) // 2
            raise ConfigError(
                f"--max-tokens: a text of {max_tokens} tokens does not fit twice into the model's "
                f"{given.max_model_len} positions; set it to {most} at most"
            )
        self.config = config_of(self.spec)
        self._model = load_natively(model, given, longest)
        self._storage = KvStorage(
            self.spec,
            num_blocks=-(-longest // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            kv_dtype=given.dtype,
            device=HOST,
        )
        attending = [self._model.record.layers[layer].attention for layer in self.spec.attending]
        assert all(isinstance(each, Attention) for each in attending), "no latent one, and no state"
        self._lengths = [self._products(each.output) for each in attending if isinstance(each, Attention)]

    def teach(self, lesson: Lesson, learn: Learn) -> None:
        """Computes a text twice, and tells what each layer learns of it."""
        ids, text, again = self._repetition.ids(lesson)
        watcher = _Watcher(text, again, self._lengths, self.spec.attending, learn)
        self._model.forward(batch_of([ids]), self._storage.layers, watcher)

    def _products(self, output: Linear) -> Floats:
        """W^T W [H, D, D] of each query head's part of the output, W [E, D]: the square of the length of W v
        is v W^T W v. W is asked of the product itself, by each unit vector, since it is packed.
        """
        model, step = self._model, StepStruct()
        size = output.packed_parts[0].inputs
        builder = ProgramBuilder(model.record, model.library, step, size + 1, model.num_threads)
        x, out = builder.buffer("unit", size), builder.buffer("of unit", self.spec.hidden_size)
        x[:] = np.eye(size + 1, size)
        builder.product(output, x, out, False)
        step.num_tokens = size + 1
        Program(model.library, builder.ops).run(model.pool)
        parts = (out[:size] - out[size]).reshape(self.spec.num_heads, -1, self.spec.hidden_size)
        return np.asarray(parts @ parts.swapaxes(1, 2))


class _Watcher:
    """Sees what each layer attends with, while a repetition is computed."""

    def __init__(
        self, text: slice, again: slice, products: Sequence[Floats], layers: Sequence[int], learn: Learn
    ) -> None:
        self._text, self._again, self._products = text, again, products
        self._layers, self._learn, self._number = layers, learn, 0
        self._states = np.zeros((0, 0), np.float32)

    def read(self, states: Floats) -> None:
        """States [T, E] that the next layer's attention computes upon."""
        self._states = states

    def watch(self, q: Floats, cache: Any, options: AttentionOptions, keys: Any = None) -> None:
        """See engine.model.watched. (The step's `keys` tell nothing more, because `cache` is of a type that
        rounds none of them.)
        """
        num_tokens = len(q)
        blocks = np.arange(-(-num_tokens // BLOCK_SIZE))
        seen, values = (
            keys_of(each, blocks)[:, :num_tokens] for each in (cache, replace(cache, keys=cache.values))
        )
        asking = self._again
        scores = repeated_scores(
            q[asking] * np.float32(options.scale),
            seen,
            values[:, self._text],
            self._products[self._number],
            np.linalg.norm(self._states[asking], axis=1),
            self._text,
            options.soft_cap,
        )
        states = np.array(self._states[self._text])
        self._learn(self._layers[self._number], states, np.log(np.maximum(scores, _LEAST)).T)
        self._number += 1


def repeated_scores(
    queries: Floats,
    keys: Floats,
    values: Floats,
    products: Floats,
    lengths: Floats,
    text: slice,
    cap: float | None,
) -> NDArray[np.float64]:
    """Scores [K, N] of a text's tokens: by scaled queries [N, H, D] of its repetition, which is what keys
    [K, T, D] end with, values [K, N, D] of the text, W^T W [H, D, D], and lengths [N] of what the queries
    were computed from.
    """
    num_kv, num_tokens = keys.shape[:2]
    count = len(queries)
    own = torch.from_numpy(queries).reshape(count, num_kv, -1, queries.shape[2]).permute(1, 2, 0, 3)
    parts = torch.from_numpy(products).reshape(num_kv, own.shape[1], *products.shape[1:])
    future = torch.arange(num_tokens) > torch.arange(num_tokens - count, num_tokens)[:, None]
    found = np.zeros((num_kv, count))
    # One head after another, because weights of all take gigabytes for long texts.
    for head in range(num_kv):
        weights = own[head] @ torch.from_numpy(keys[head]).T  # [G, N, T]
        weights = weights if cap is None else cap * torch.tanh(weights / cap)
        shares = weights.masked_fill_(future, float("-inf")).softmax(-1)[..., text]
        most = (shares / torch.from_numpy(lengths)[:, None]).amax(1)
        value = torch.from_numpy(np.ascontiguousarray(values[head]))
        added = torch.einsum("nd,gde,ne->gn", value, parts[head], value).clamp_min(0).sqrt()
        found[head] = (most * added).amax(0).numpy()
    return found
