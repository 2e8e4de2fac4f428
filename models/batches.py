"""From documents to packed rows: token ids, next-token targets and a weight per target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.chat_format import segments
from models.corpus import CorpusDocument

END_OF_TEXT_ID = 0
TASK_WEIGHTS = {"story": 0.3, "copying": 0.5}
"""Loss weight of a trained token; 1 where not named. Long easy texts would otherwise drown the short exact
answers."""
LOOKAHEAD = 48
"""Documents held back to fill a row tightly."""

Row = tuple[list[int], list[float]]


@dataclass(frozen=True)
class TrainingBatch:
    """ids [B, T]; `selected` [N] flat positions whose next token is trained; targets [N]; weights [N]."""

    ids: Tensor
    selected: Tensor
    targets: Tensor
    weights: Tensor


def encode(tokenizer: Tokenizer, document: CorpusDocument) -> Row:
    """Ids and weights of one document, closed by `<|endoftext|>`."""
    ids: list[int] = []
    weights: list[float] = []
    weight = TASK_WEIGHTS.get(document.task, 1.0)
    for text, trained in segments(document):
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids += piece
        weights += [weight if trained else 0.0] * len(piece)
    if ids[-1] != END_OF_TEXT_ID:
        ids.append(END_OF_TEXT_ID)
        weights.append(0.0)
    return ids, weights


def rows(tokenizer: Tokenizer, source: Iterator[CorpusDocument], sequence_length: int) -> Iterator[Row]:
    """Endless rows of `sequence_length` + 1 tokens, whole documents only, padded at the end."""
    size = sequence_length + 1
    pool: list[Row] = []
    ids: list[int] = []
    weights: list[float] = []
    while True:
        while len(pool) < LOOKAHEAD:
            row = encode(tokenizer, next(source))
            if len(row[0]) <= size:
                pool.append(row)
        place = next((index for index, row in enumerate(pool) if len(ids) + len(row[0]) <= size), None)
        if place is None:
            padding = size - len(ids)
            yield ids + [END_OF_TEXT_ID] * padding, weights + [0.0] * padding
            ids, weights = [], []
        else:
            more_ids, more_weights = pool.pop(place)
            ids, weights = ids + more_ids, weights + more_weights


def batches(
    tokenizer: Tokenizer, source: Iterator[CorpusDocument], sequence_length: int, num_rows: int
) -> Iterator[TrainingBatch]:
    """Endless batches of `num_rows` x `sequence_length` from an endless stream of documents."""
    packed = rows(tokenizer, source, sequence_length)
    while True:
        chosen = [next(packed) for _ in range(num_rows)]
        ids = torch.tensor([row[0] for row in chosen])
        weights = torch.tensor([row[1] for row in chosen])[:, 1:].flatten()
        selected = weights.nonzero().squeeze(1)
        targets = ids[:, 1:].flatten()[selected]
        yield TrainingBatch(ids[:, :-1].contiguous(), selected, targets, weights[selected])
