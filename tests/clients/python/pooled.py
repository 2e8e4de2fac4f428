"""Where a client's program finds the stack of models that pool, and what that should answer."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

TOLD = json.loads(Path(os.environ["CLIENTS_POOLED"]).read_text(encoding="utf-8"))
URL = TOLD["url"]
KEY = TOLD["api_key"]
TEXTS = TOLD["texts"]
QUERY, *DOCUMENTS = TEXTS
# Documents by falling relevance, as transformers has it.
ORDER = sorted(range(len(DOCUMENTS)), key=lambda index: -TOLD["relevances"][index])


def check_embedding(values: Sequence[float], index: int) -> None:
    """The vector must be the one that transformers makes of the text of this index."""
    expected = TOLD["embeddings"][index]
    lengths = math.hypot(*values) * math.hypot(*expected)
    cosine = sum(one * other for one, other in zip(values, expected, strict=True)) / lengths
    assert cosine >= 1 - 1e-6, cosine


def check_ranking(indexes: Sequence[int], scores: Sequence[float]) -> None:
    """The order of the documents, and how relevant each is, must be transformers'."""
    assert list(indexes) == ORDER[: len(indexes)], (indexes, ORDER)
    for index, score in zip(indexes, scores, strict=True):
        assert abs(score - TOLD["relevances"][index]) < 3e-5, (index, score)
