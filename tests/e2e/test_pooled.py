"""Embeddings, rerankings, scores and classes over the real stack, beside a model that generates."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers
from millrace.inference.v1 import inference_pb2, inference_pb2_grpc
from sqlalchemy import select
from tokenizers import Tokenizer

from gateway.ledger.tables import REQUESTS, open_ledger
from services.supervisor.config import ROOT
from tests.e2e.conftest import needs_weights
from tests.e2e.stack import CONFIG, LIMIT_S, Stack, eventually, running_stack
from tests.unit.engine.pooled_checkpoints import cosine, pooled_checkpoint, reference_embedding
from tests.unit.tokenizer_svc.pooled import write_word_pieces

pytestmark = [pytest.mark.e2e, needs_weights]

NANO = ROOT / "models" / "millrace-nano"
TEXTS = ["hello there", "a cold wind from the sea", "the sea is cold and the wind is from there"]
MODELS = """
[models.embed]
path = "{embed}"
[models.rank]
path = "{rank}"
[models.chat]
path = "{chat}"
[gateway.prices.embed]
prompt = 2.0
"""


class Served:
    """The stack, and transformers' models of what it serves."""

    def __init__(self, stack: Stack, embed: Any, rank: Any, folder: Path) -> None:
        self.stack, self.embed, self.rank = stack, embed, rank
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def post(self, path: str, **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.stack.state.api_key}"}
        url = f"{self.stack.url}{path}"
        return httpx.post(url, json=body, headers=headers, timeout=LIMIT_S, trust_env=False)

    def expected(self, text: str) -> Any:
        return reference_embedding(self.embed, self.tokenizer.encode(text).ids, "mean")

    def relevance(self, query: str, document: str) -> float:
        pair = self.tokenizer.encode(query, document)
        given = {"input_ids": torch.tensor([pair.ids]), "token_type_ids": torch.tensor([pair.type_ids])}
        with torch.no_grad():
            return float(torch.sigmoid(self.rank(**given).logits)[0, 0])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("checkpoints")
    embed = pooled_checkpoint(folder / "embed", "bert", pooling="mean", max_position_embeddings=64)
    rank = pooled_checkpoint(
        folder / "rank", "bert", auto=transformers.AutoModelForSequenceClassification, num_labels=1
    )
    for name in ("embed", "rank"):
        write_word_pieces(folder / name)
    config = CONFIG + MODELS.format(embed=folder / "embed", rank=folder / "rank", chat=NANO)
    with running_stack(tmp_path_factory.mktemp("stack"), config=config, model=None) as stack:
        yield Served(stack, embed, rank, folder / "embed")
        stack.assert_nothing_leaked()


def test_the_sdk_gets_the_embeddings_of_the_model(served: Served) -> None:
    with served.stack.openai() as client:
        answer = client.embeddings.create(model="embed", input=TEXTS)
        alone = client.embeddings.create(model="embed", input=TEXTS[1], encoding_format="float", user="anna")
    for text, each in zip(TEXTS, answer.data, strict=True):
        assert cosine(np.array(each.embedding), served.expected(text)) >= 1 - 1e-6
    assert [each.index for each in answer.data] == [0, 1, 2]
    # The SDK asks for base64 on its own.
    np.testing.assert_array_equal(np.float32(alone.data[0].embedding), np.float32(answer.data[1].embedding))
    num_tokens = sum(len(served.tokenizer.encode(text).ids) for text in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == num_tokens


def test_ids_and_base64_are_taken_and_given(served: Served) -> None:
    ids = served.tokenizer.encode(TEXTS[0]).ids
    text = served.post("/v1/embeddings", model="embed", input=TEXTS[0]).json()["data"][0]["embedding"]
    for given in (ids, [ids]):
        answer = served.post("/v1/embeddings", model="embed", input=given, encoding_format="base64").json()
        packed = base64.b64decode(answer["data"][0]["embedding"])
        np.testing.assert_array_equal(np.frombuffer(packed, "<f4"), np.float32(text))


def test_a_batch_of_embeddings_is_answered_line_by_line(served: Served) -> None:
    lines = [
        {
            "custom_id": text,
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": "embed", "input": text},
        }
        for text in TEXTS
    ]
    lines.append(lines[0] | {"custom_id": "chat", "body": {"model": "chat", "input": "hello"}})
    data = "\n".join(map(json.dumps, lines)).encode()
    with served.stack.openai() as client:
        file = client.files.create(file=("texts.jsonl", data), purpose="batch")
        made = client.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
        )
        assert eventually(lambda: client.batches.retrieve(made.id).status == "completed")
        done = client.batches.retrieve(made.id)
        assert done.output_file_id is not None
        assert done.error_file_id is not None
        found = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
        (error,) = client.files.content(done.error_file_id).text.splitlines()
    assert sorted(each["custom_id"] for each in found) == sorted(TEXTS)
    for each in found:
        (embedding,) = each["response"]["body"]["data"]
        expected = served.expected(each["custom_id"])
        assert cosine(np.array(embedding["embedding"]), expected) >= 1 - 1e-6
    assert json.loads(error)["response"]["status_code"] == 400


def test_documents_are_ordered_as_the_cross_encoder_says(served: Served) -> None:
    query, documents = TEXTS[0], [*TEXTS[1:], "wind"]
    relevances = [served.relevance(query, document) for document in documents]
    best = sorted(range(3), key=lambda index: -relevances[index])
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        body = {"model": "rank", "query": query, "documents": documents, "return_documents": True}
        results = served.post(path, **body).json()["results"]
        assert [each["index"] for each in results] == best
        assert [each["document"]["text"] for each in results] == [documents[index] for index in best]
        found = [each["relevance_score"] for each in results]
        np.testing.assert_allclose(found, [relevances[index] for index in best], atol=2e-5)
    few = served.post("/v1/rerank", model="rank", query=query, documents=documents, top_n=1).json()
    assert [each["index"] for each in few["results"]] == best[:1]
    assert "document" not in few["results"][0]
    scored = served.post("/v1/score", model="rank", text_1=query, text_2=documents).json()
    np.testing.assert_allclose([each["score"] for each in scored["data"]], relevances, atol=2e-5)
    classes = served.post("/v1/classify", model="rank", input=TEXTS).json()["data"]
    assert [each["num_classes"] for each in classes] == [1, 1, 1]


def test_a_model_of_embeddings_scores_by_their_cosines(served: Served) -> None:
    scored = served.post("/v1/score", model="embed", text_1=TEXTS[0], text_2=TEXTS).json()["data"]
    expected = [cosine(served.expected(TEXTS[0]), served.expected(text)) for text in TEXTS]
    np.testing.assert_allclose([each["score"] for each in scored], expected, atol=2e-5)


def test_grpc_gives_the_same(served: Served) -> None:
    with served.stack.channel() as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        options = {"metadata": served.stack.metadata(), "timeout": LIMIT_S}
        inputs = [inference_pb2.PooledInput(text=text) for text in TEXTS]
        embedded = stub.Embed(inference_pb2.EmbedRequest(model="embed", inputs=inputs), **options)
        ranked = stub.Rerank(
            inference_pb2.RerankRequest(model="rank", query=TEXTS[0], documents=TEXTS), **options
        )
        scored = stub.Score(
            inference_pb2.ScoreRequest(model="rank", first=TEXTS[:1], second=TEXTS), **options
        )
        classified = stub.Classify(inference_pb2.ClassifyRequest(model="rank", inputs=inputs), **options)
        listed = stub.ListModels(inference_pb2.ListModelsRequest(), **options)
    for text, each in zip(TEXTS, embedded.embeddings, strict=True):
        assert cosine(np.array(each.values), served.expected(text)) >= 1 - 1e-6
    relevances = [served.relevance(TEXTS[0], text) for text in TEXTS]
    np.testing.assert_allclose(scored.scores, relevances, atol=2e-5)
    np.testing.assert_allclose(
        [each.relevance_score for each in ranked.results], sorted(relevances, reverse=True), atol=2e-5
    )
    assert len(classified.classifications) == 3
    tasks = {model.id: list(model.tasks) for model in listed.models}
    expected = {"embed": ["embed"], "rank": ["score", "classify"], "chat": ["generate"]}
    assert {name: tasks[name] for name in expected} == expected


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/embeddings", {"model": "embed", "input": []}, "input", "empty"),
    ("/v1/embeddings", {"model": "embed", "input": ["a", ""]}, "input[1]", "empty"),
    ("/v1/embeddings", {"model": "embed", "input": ["a"] * 3000}, "input", "2048"),
    ("/v1/embeddings", {"model": "embed", "input": "a", "dimensions": 8}, "dimensions", "not made for"),
    ("/v1/embeddings", {"model": "embed", "input": "a", "prompt_name": "x"}, "prompt_name", "none"),
    ("/v1/embeddings", {"model": "chat", "input": "a"}, "model", "generate"),
    ("/v1/embeddings", {"model": "rank", "input": "a"}, "model", "/v1/rerank"),
    ("/v1/embeddings", {"model": "embed", "input": [[4, 100_000]]}, "input[0]", "vocabulary"),
    ("/v1/rerank", {"model": "chat", "query": "a", "documents": ["b"]}, "model", "score"),
    ("/v1/rerank", {"model": "rank", "query": "", "documents": ["b"]}, "query", "empty"),
    ("/v1/score", {"model": "rank", "text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "as many"),
    (
        "/v1/chat/completions",
        {"model": "embed", "messages": [{"role": "user", "content": "a"}]},
        "model",
        "embed",
    ),
    ("/v1/completions", {"model": "rank", "prompt": "a"}, "model", "/v1/classify"),
]


@pytest.mark.parametrize(("path", "body", "param", "told"), REFUSED)
def test_bad_input_is_refused_by_name(
    served: Served, path: str, body: dict[str, Any], param: str, told: str
) -> None:
    answer = served.post(path, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == param, error
    assert told in error["message"], error


def test_a_text_beyond_the_window_is_refused_or_cut_as_asked(served: Served) -> None:
    text = "wind " * 100
    refused = served.post("/v1/embeddings", model="embed", input=["a", text])
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "input[1]"
    assert "64" in refused.json()["error"]["message"]
    cut = served.post("/v1/embeddings", model="embed", input=f"sea {text}", truncate="END")
    ids = served.tokenizer.encode(f"sea {text}").ids
    expected = reference_embedding(served.embed, [*ids[:63], ids[-1]], "mean")
    assert cosine(np.array(cut.json()["data"][0]["embedding"]), expected) >= 1 - 1e-6
    assert f"left out the last {len(ids) - 64} of" in cut.headers["x-millrace-warning"]
    end = served.post("/v1/embeddings", model="embed", input=f"sea {text}", truncate="START")
    assert f"left out the first {len(ids) - 64} of" in end.headers["x-millrace-warning"]
    assert cut.json()["usage"]["prompt_tokens"] == 64


def test_tasks_are_listed_and_tokens_are_in_the_ledger(served: Served) -> None:
    with served.stack.openai() as client:
        tasks = {model.id: model.model_dump()["tasks"] for model in client.models.list().data}
        assert tasks["embed"] == ["embed"]
        named = {"x-client-request-id": "booked"}
        usage = client.embeddings.create(model="embed", input=TEXTS, extra_headers=named).usage
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="chat", input=TEXTS, extra_headers=named)
    expected = usage.prompt_tokens, 2000 * usage.prompt_tokens
    assert eventually(lambda: _booked(served.stack, "booked") == expected), _booked(served.stack, "booked")


def _booked(stack: Stack, client_request_id: str) -> tuple[int, int]:
    """Prompt tokens of a request in the ledger, an entry for each text, and their cost in billionths."""
    with open_ledger(f"sqlite:///{stack.directory}/ledger.sqlite").connect() as connection:
        rows = list(connection.execute(select(REQUESTS)).mappings())
    booked = [row for row in rows if row["client_request_id"] == client_request_id]
    return sum(row["prompt_tokens"] for row in booked), sum(row["cost_nanos"] for row in booked)
