"""The clients' second stack: two small random models that pool, and transformers' answers to its texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.e2e.stack import CONFIG, running_stack
from tests.unit.engine.pooled_checkpoints import pooled_checkpoint, reference_embedding
from tests.unit.tokenizer_svc.pooled import write_word_pieces

TEXTS = ["hello there", "a cold wind from the sea", "who sells red and blue fish", "the sea is green"]
_MODELS = """
[models.embed]
path = "{folder}/embed"
[models.rank]
path = "{folder}/rank"
"""


@contextmanager
def pooled_stack(folder: Path) -> Iterator[Path]:
    """The stack, until the end of the block; gives the file that tells programs of it."""
    embed = pooled_checkpoint(folder / "embed", "bert", pooling="mean", max_position_embeddings=64)
    rank = pooled_checkpoint(
        folder / "rank", "bert", auto=transformers.AutoModelForSequenceClassification, num_labels=1
    )
    write_word_pieces(folder / "rank")
    tokenizer = write_word_pieces(folder / "embed")
    query, *documents = TEXTS
    expected = {
        "texts": TEXTS,
        "embeddings": [
            reference_embedding(embed, tokenizer.encode(text).ids, "mean").tolist() for text in TEXTS
        ],
        "relevances": [_relevance(rank, tokenizer.encode(query, document)) for document in documents],
        "checkpoint": str(folder / "embed"),
    }
    with running_stack(folder / "stack", config=CONFIG + _MODELS.format(folder=folder), model=None) as stack:
        told = folder / "told.json"
        told.write_text(json.dumps({"url": stack.url, "api_key": stack.state.api_key, **expected}))
        yield told
        stack.assert_nothing_leaked()


def _relevance(model: Any, pair: Any) -> float:
    given = {"input_ids": torch.tensor([pair.ids]), "token_type_ids": torch.tensor([pair.type_ids])}
    with torch.no_grad():
        return float(torch.sigmoid(model(**given).logits)[0, 0])
