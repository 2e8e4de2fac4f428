"""MTEB's evaluation of one small task: the endpoint's embeddings beside sentence-transformers' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import mteb
import numpy as np
import openai
from mteb.abstasks import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models import ModelMeta
from pooled import KEY, TEXTS, TOLD, URL
from report import OUT, works
from sentence_transformers import SentenceTransformer

CHECKPOINT = TOLD["checkpoint"]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY)


class Pairs(AbsTaskSTS):
    """Pairs of sentences with a similarity that somebody gave."""

    metadata = TaskMetadata(
        name="Pairs",
        dataset={"path": "local/pairs", "revision": "1"},
        description="Pairs of sentences",
        reference=None,
        type="STS",
        category="t2t",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="cosine_spearman",
        date=None,
        domains=None,
        task_subtypes=None,
        license=None,
        annotations_creators=None,
        dialect=None,
        sample_creation=None,
        bibtex_citation=None,
    )
    min_score = 0
    max_score = 5

    def load_data(self, **_: Any) -> None:
        words = 3 * " ".join(TEXTS).split()
        texts = [" ".join(words[at : at + 3 + at % 4]) for at in range(40)]
        rows = {
            "sentence1": texts,
            "sentence2": [texts[(7 * at + 3) % len(texts)] for at in range(len(texts))],
            "score": [float(at * 3 % 6) for at in range(len(texts))],
        }
        self.dataset = datasets.DatasetDict({"test": datasets.Dataset.from_dict(rows)})
        self.data_loaded = True


class Endpoint:
    """`/v1/embeddings` as a model of MTEB's."""

    mteb_model_meta = ModelMeta.create_empty(overwrites={"name": "local/embed", "revision": "1"})

    def encode(self, inputs: Any, **_: Any) -> np.ndarray:
        texts = [text for batch in inputs for text in batch["text"]]
        answer = client.embeddings.create(model="embed", input=texts)
        return np.array([each.embedding for each in answer.data])

    def similarity(self, one: Any, other: Any) -> Any:
        return mteb.similarity_functions.cos_sim(one, other)

    def similarity_pairwise(self, one: Any, other: Any) -> Any:
        return mteb.similarity_functions.pairwise_cos_sim(one, other)


def score(model: Any) -> dict[str, float]:
    """All figures of the task."""
    found = mteb.evaluate(model, Pairs(), cache=None, show_progress_bar=False)
    (told,) = found.task_results[0].scores["test"]
    return {name: value for name, value in told.items() if isinstance(value, float)}


def main() -> None:
    """The same figures from both."""
    own, served = score(SentenceTransformer(CHECKPOINT, device="cpu")), score(Endpoint())
    (Path(OUT) / "scores.json").write_text(json.dumps({"sentence-transformers": own, "served": served}))
    assert "cosine_spearman" in own
    for name, value in own.items():
        assert abs(served[name] - value) < 1e-5, (name, served[name], value)


with works("a task of mteb's has the score of sentence-transformers"):
    main()
