"""Models that pool, served by vLLM's engines: numbers are those of transformers in all tasks, also when the
engine has been replaced.

Needs vLLM's environment, as test_vllm_killed does.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tests.e2e.stack import CONFIG, START_LIMIT_S, VLLM_SETTINGS, Stack, eventually, running_stack
from tests.unit.engine.pooled_checkpoints import cosine, pooled_checkpoint, reference_embedding
from tests.unit.tokenizer_svc.pooled import write_word_pieces

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.usefixtures("vllm")]

TEXTS = ["hello there", "a cold wind from the sea", "the sea is cold and the wind is from there"]
# Heads of 32 elements: vLLM's kernels for CPUs have none that are smaller.
SIZES: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 64}
SETTINGS = {
    **VLLM_SETTINGS,
    "MILLRACE_ENGINE__DTYPE": "float32",
    "MILLRACE_ENGINE__CACHE__KV_CACHE_BYTES": str(1 << 26),
}
MODELS = """
[models.embed]
path = "{folder}/embed"
[models.rank]
path = "{folder}/rank"
"""


class Served:
    """The stack, and transformers' models of what it serves."""

    def __init__(self, stack: Stack, embed: Any, rank: Any, folder: Path) -> None:
        self.stack, self.embed, self.rank = stack, embed, rank
        self.tokenizer = Tokenizer.from_file(str(folder / "embed" / "tokenizer.json"))

    def post(self, path: str, **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.stack.state.api_key}"}
        url = f"{self.stack.url}{path}"
        return httpx.post(url, json=body, headers=headers, timeout=START_LIMIT_S, trust_env=False)

    def assert_embedded(self, data: list[dict[str, Any]]) -> None:
        for text, each in zip(TEXTS, data, strict=True):
            expected = reference_embedding(self.embed, self.tokenizer.encode(text).ids, "mean")
            assert cosine(np.array(each["embedding"]), expected) >= 1 - 1e-6
            assert np.linalg.norm(each["embedding"]) == pytest.approx(1, abs=1e-5)

    def relevance(self, query: str, document: str) -> float:
        pair = self.tokenizer.encode(query, document)
        given = {"input_ids": torch.tensor([pair.ids]), "token_type_ids": torch.tensor([pair.type_ids])}
        with torch.no_grad():
            return float(torch.sigmoid(self.rank(**given).logits)[0, 0])


@pytest.fixture(scope="module")
def served(vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("checkpoints")
    embed = pooled_checkpoint(folder / "embed", "bert", pooling="mean", **SIZES)
    kind = transformers.AutoModelForSequenceClassification
    rank = pooled_checkpoint(folder / "rank", "bert", auto=kind, num_labels=1, **SIZES)
    for name in ("embed", "rank"):
        write_word_pieces(folder / name)
    config = CONFIG + MODELS.format(folder=folder)
    directory = tmp_path_factory.mktemp("stack")
    with running_stack(
        directory, "--engine", "vllm", config=config, environment=SETTINGS, model=None
    ) as stack:
        yield Served(stack, embed, rank, folder)
        stack.assert_nothing_leaked()


def test_embeddings_are_those_of_the_model(served: Served) -> None:
    answer = served.post("/v1/embeddings", model="embed", input=TEXTS).json()
    served.assert_embedded(answer["data"])
    num_tokens = sum(len(served.tokenizer.encode(text).ids) for text in TEXTS)
    assert answer["usage"]["prompt_tokens"] == num_tokens
    many = served.post("/v1/embeddings", model="embed", input=TEXTS * 40).json()["data"]
    for begin in range(0, len(many), len(TEXTS)):
        served.assert_embedded(many[begin : begin + len(TEXTS)])


def test_pairs_are_ranked_as_the_model_does(served: Served) -> None:
    query, documents = TEXTS[0], TEXTS[1:]
    results = served.post("/v1/rerank", model="rank", query=query, documents=documents).json()["results"]
    found = {each["index"]: each["relevance_score"] for each in results}
    for index, document in enumerate(documents):
        assert found[index] == pytest.approx(served.relevance(query, document), abs=1e-5)
    classes = served.post("/v1/classify", model="rank", input=documents)
    assert classes.status_code == 200, classes.text


def test_what_the_model_cannot_do_is_refused_by_name(served: Served) -> None:
    refused = served.post("/v1/embeddings", model="rank", input="hello").json()["error"]
    assert refused["param"] == "model"
    long = served.post("/v1/embeddings", model="embed", input="sea " * 100).json()["error"]
    assert "64" in long["message"]
    few = served.post("/v1/embeddings", model="embed", input="sea", dimensions=1000).json()["error"]
    assert few["param"] == "dimensions"


def test_an_engine_that_is_killed_comes_back(served: Served) -> None:
    os.kill(served.stack.pid("engine-0"), signal.SIGKILL)
    said = served.stack.output
    assert eventually(lambda: "engine-0 is ready again" in said.read_text(), START_LIMIT_S)

    def ask() -> httpx.Response:
        return served.post("/v1/embeddings", model="embed", input=TEXTS)

    assert eventually(lambda: ask().status_code == 200), served.stack.transcript()
    served.assert_embedded(ask().json()["data"])
