"""Draws and reports by the native kernels (sampling.h), for logits in main memory.

Shape letters: R rows, V vocabulary.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from kernels.host import Values, as_array, empty
from kernels.native.library import NativeLibrary, NativeUnavailableError, Op, Program, load_native
from kernels.native.mirror import structure
from kernels.sampling.noise import row_keys, sequence_streams
from kernels.sampling.rows import NO_ROW, OPTIONS, SamplingRows, Tables

SAMPLE_ROW = np.dtype(structure("SampleRow"))
# Fields of a row that are copied from its sequence's options.
_COPIED = tuple(name for name in OPTIONS.names or () if name in SAMPLE_ROW.fields)


@cache
def sampling_library() -> NativeLibrary | None:
    """The native library, or None where it cannot be had."""
    try:
        return load_native()
    except NativeUnavailableError:
        return None


class NativeDraws:
    """The native sampler, with buffers that serve one step after another. Not thread-safe."""

    def __init__(self, library: NativeLibrary) -> None:
        self.library = library
        self.args = structure("SampleArgs")()
        # Arrays that the args point to, kept alive until the next draw.
        self._kept: object = None
        # Noise of the followed rows' sequences; None where all are greedy.
        self.streams: NDArray[np.uint64] | None = None
        # The rows that the args describe, while `follow` has said so.
        self.followed: SamplingRows | None = None
        self.op = Op(library, "sample", self.args)
        self._program = Program(library, [self.op])
        self._resize(1)

    def _resize(self, capacity: int) -> None:
        # All zeros is the most likely token.
        self.described = np.zeros(capacity, SAMPLE_ROW)
        # Whether any row says something else.
        self._written = False
        self.tokens = np.zeros(capacity, np.int64)
        self.finite, self.allowed = np.zeros(capacity, np.bool_), np.zeros(capacity, np.bool_)
        self.args.rows = self.described.ctypes.data
        self.args.tokens = self.tokens.ctypes.data
        self.args.finite = self.finite.ctypes.data
        self.args.allowed = self.allowed.ctypes.data

    def draw(
        self, logits: Values, table: Tables, rows: SamplingRows
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_], NDArray[np.float32]]:
        """Tokens, whether logits were finite, whether a token was allowed (each [R]), and processed logits
        [R, V] for logits [R, V] in float32.
        """
        given = np.ascontiguousarray(as_array(logits))
        processed = self._prepare(given, table, rows)
        self._program.run(self.library.pool(self.library.usual_threads))
        count = given.shape[0]
        return (
            self.tokens[:count].copy(),
            self.finite[:count].copy(),
            self.allowed[:count].copy(),
            processed,
        )

    def follow(
        self, logits: NDArray[np.float32], table: Tables, rows: SamplingRows
    ) -> NDArray[np.float32] | None:
        """Lets `op` draw these rows (without grammar and drafts) from logits [R, V], contiguous, in this step
        and in later ones, until another draw. Who runs it brings the keys of `described` up to date where
        there are `streams`. Returns the processed logits, or None while a row has to wait for its end.
        """
        options = table.options[rows.slots]
        if (rows.positions < options["min_tokens"]).any():
            return None
        processed = self._prepare(logits, table, rows)
        self.streams = None
        if self._written:
            self.streams = sequence_streams(options["seed"].copy(), options["choice"].copy())
        self.followed = rows
        return processed

    def _prepare(self, given: NDArray[np.float32], table: Tables, rows: SamplingRows) -> NDArray[np.float32]:
        """Points the args to what the draw needs; returns where the processed logits will be."""
        count, vocab_size = given.shape
        self.followed = None
        if count > self.described.size:
            self._resize(2 * count)
        if self._written:
            self.described[:] = 0
            self._written = False
        processed, args = given, self.args
        args.processed = args.stop_ids = args.draft_tokens = None
        kept: list[NDArray[np.generic]] = []
        if rows.grammar_masks is not None or not table.plain[rows.slots].all():
            described = self.described[:count]
            self._written = True
            kept = _describe(described, table, rows)
            args.stop_ids, args.draft_tokens = kept[0].ctypes.data, kept[1].ctypes.data
            if any(described[name].any() for name in ("counts", "bias", "mask", "num_stops")):
                processed = empty(given.shape)
                args.processed = processed.ctypes.data
        args.logits = given.ctypes.data
        args.num_rows, args.vocab_size = count, vocab_size
        self._kept = (given, processed, kept)
        return processed


def _describe(described: NDArray[np.void], table: Tables, rows: SamplingRows) -> list[NDArray[np.generic]]:
    """Fills in what the rows ask for; returns what `_describe_wide` does."""
    options = table.options[rows.slots]
    for name in _COPIED:
        described[name] = options[name]
    described["key"] = row_keys(options["seed"].copy(), options["choice"].copy(), rows.positions)
    return _describe_wide(described, options, table, rows)


def _describe_wide(
    described: NDArray[np.void], options: NDArray[np.void], table: Tables, rows: SamplingRows
) -> list[NDArray[np.generic]]:
    """Points rows at what is as wide as the vocabulary, and at their stop tokens and drafts. Returns the stop
    tokens, the drafts and whatever else must outlive the call.
    """
    vocab_size = table.vocab_size
    wide = (
        ("bias", "bias_row", table.biases.rows, 4),
        ("counts", "count_row", table.output_counts.rows, 4),
        ("seen", "count_row", table.seen.rows, 1),
    )
    for name, index, stored, size in wide:
        at = options[index]
        described[name] = np.where(at == NO_ROW, 0, stored.ctypes.data + at * vocab_size * size)
    stops: list[int] = []
    for row in np.flatnonzero(rows.positions < options["min_tokens"]).tolist():
        found = table.stop_ids.get(int(rows.slots[row]), ())
        described["first_stop"][row], described["num_stops"][row] = len(stops), len(found)
        stops.extend(found)
    order = np.argsort(rows.draft_rows, kind="stable")
    drafts = np.ascontiguousarray(rows.draft_tokens[order], np.int64)
    numbers = np.bincount(rows.draft_rows, minlength=len(described))
    described["num_drafts"] = numbers
    described["first_draft"] = np.cumsum(numbers) - numbers
    kept: list[NDArray[np.generic]] = [np.array(stops, np.int64), drafts]
    if rows.grammar_masks is not None and rows.grammar_rows.size:
        masks = np.ascontiguousarray(rows.grammar_masks, np.int32)
        at = np.arange(len(rows.grammar_rows)) * masks.strides[0]
        described["mask"][rows.grammar_rows] = masks.ctypes.data + at
        kept.append(masks)
    return kept


def native_logprobs(
    library: NativeLibrary, logits: Values, tokens: list[int], num_best: int, excluded: Values | None
) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """Log-probabilities of tokens [R] under logits [R, V] in float32, and ids and log-probabilities of the
    num_best most likely that are not excluded [R, V] (fewer where too few are left), best first.
    """
    given = np.ascontiguousarray(as_array(logits))
    count, vocab_size = given.shape
    num_best = min(num_best, vocab_size)
    asked = np.array(tokens, np.int64)
    chosen = np.empty(count, np.float32)
    ids, best = np.empty((count, num_best), np.int64), np.empty((count, num_best), np.float32)
    hidden = None if excluded is None else np.ascontiguousarray(as_array(excluded))
    args = structure("LogprobArgs")(
        logits=given.ctypes.data,
        tokens=asked.ctypes.data,
        excluded=None if hidden is None else hidden.ctypes.data,
        chosen=chosen.ctypes.data,
        best_ids=ids.ctypes.data,
        best=best.ctypes.data,
        num_best=num_best,
        num_rows=count,
        vocab_size=vocab_size,
    )
    library.run([Op(library, "logprobs", args, hidden)], num_threads=library.usual_threads)
    numbers = (ids >= 0).sum(-1).tolist()
    return (
        chosen.tolist(),
        [row[:number] for row, number in zip(ids.tolist(), numbers, strict=True)],
        [row[:number] for row, number in zip(best.tolist(), numbers, strict=True)],
    )
