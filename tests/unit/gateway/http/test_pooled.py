"""Embeddings and scores over both faces: what engines are asked for, and what becomes of answers."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

import pytest
from millrace.inference.v1 import inference_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

from contract.errors import MillraceError, Reason
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import deployed, signed_context
from tests.unit.gateway.rig.pooling import PoolingEngine, PoolingTokenizer
from tests.unit.gateway.rig.tokenizer import ByteTokenizer
from tests.unit.gateway.rig.vocabulary import encode


async def test_embeddings_are_those_of_the_engine_in_order() -> None:
    engine = PoolingEngine()
    async with deployed(engine, tokenizer=PoolingTokenizer()) as stack:
        body = {"model": "tiny", "input": ["abc", "b", [97, 98, 99, 100]]}
        answer = (await stack.http.post("/v1/embeddings", json=body)).json()
        packed = (await stack.http.post("/v1/embeddings", json={**body, "encoding_format": "base64"})).json()
    first = [encode(text)[0] for text in ("abc", "b")]
    assert [each["embedding"] for each in answer["data"]] == [[3.0, first[0]], [1.0, first[1]], [4.0, 97.0]]
    assert answer["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
    assert [base64.b64decode(each["embedding"]) for each in packed["data"]] == [
        struct.pack("<2f", *each["embedding"]) for each in answer["data"]
    ]
    assert {submit.pooling.task for submit in engine.submissions} == {"embed"}


async def test_many_texts_in_tokens_are_taken_and_too_many_are_told_their_limit() -> None:
    async with deployed(PoolingEngine(), tokenizer=PoolingTokenizer()) as stack:

        async def ask(path: str, **body: Any) -> dict[str, Any]:
            told: dict[str, Any] = (await stack.http.post(path, json={"model": "tiny", **body})).json()
            return told

        answer = await ask("/v1/embeddings", input=[[97] * 70] * 1000)
        assert answer["usage"]["prompt_tokens"] == 70_000
        error = (await ask("/v1/embeddings", input=["a"] * 100_000))["error"]
        assert error["message"].startswith("input: 100000 inputs; the limit is 2048")
        error = (await ask("/v1/rerank", query="q", documents=["a"] * 100_000))["error"]
        assert error["message"].endswith("a request has at most 2048 texts")


async def test_instructions_and_cuts_are_the_models_unless_asked_otherwise() -> None:
    tokenizer = PoolingTokenizer(
        prompts={"query": "Q: ", "plain": "P: "}, default_prompt="plain", max_tokens=9, truncates=True
    )
    async with deployed(PoolingEngine(), tokenizer=tokenizer) as stack:
        for options in (
            {},
            {"prompt_name": "query"},
            {"prompt_name": "", "truncate": "NONE"},
            {"truncate": "START"},
        ):
            await stack.http.post("/v1/embeddings", json={"model": "tiny", "input": "abc", **options})
        refused = await stack.http.post(
            "/v1/embeddings", json={"model": "tiny", "input": "abc", "prompt_name": "other"}
        )
    assert [each.texts.texts[0].text for each in tokenizer.prepared] == ["P: abc", "Q: abc", "abc", "P: abc"]
    assert [each.max_prompt_tokens for each in tokenizer.prepared] == [9] * 4
    assert [each.truncation for each in tokenizer.prepared] == [
        tokenizer_pb2.TRUNCATION_KEEP_START,
        tokenizer_pb2.TRUNCATION_KEEP_START,
        tokenizer_pb2.TRUNCATION_UNSPECIFIED,
        tokenizer_pb2.TRUNCATION_KEEP_END,
    ]
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt_name"


async def test_the_longest_text_is_told_as_it_holds() -> None:
    """An engine reads more than the model's own files allow."""
    engine = PoolingEngine(max_model_len=512)
    async with deployed(engine, tokenizer=PoolingTokenizer(max_tokens=256)) as stack:
        listed = (await stack.http.get("/v1/models")).json()["data"]
        counted = (await stack.http.post("/tokenize", json={"model": "tiny", "prompt": "abc"})).json()
        told = [each["max_model_len"] for each in (*listed, counted)]
        await stack.http.post("/v1/embeddings", json={"model": "tiny", "input": "abc"})
        (asked,) = stack.tokenizer.prepared
    assert set(told) == {256}
    assert asked.max_prompt_tokens == 256


async def test_dimensions_are_for_models_made_for_fewer() -> None:
    engine = PoolingEngine()
    tokenizer = PoolingTokenizer(num_dimensions=8, has_fewer_dimensions=True, dimensions=[2, 4])
    async with deployed(engine, tokenizer=tokenizer) as stack:
        body = {"model": "tiny", "input": "abc"}
        taken = await stack.http.post("/v1/embeddings", json={**body, "dimensions": 2})
        refused = await stack.http.post("/v1/embeddings", json={**body, "dimensions": 3})
    assert taken.status_code == 200
    assert engine.submissions[0].pooling.dimensions == 2
    assert "2, 4" in refused.json()["error"]["message"]


async def test_pairs_are_read_together_and_the_best_come_first() -> None:
    engine = PoolingEngine()
    tokenizer = PoolingTokenizer(tasks=["score", "classify"], labels=["LABEL_0"])
    async with deployed(engine, tokenizer=tokenizer) as stack:
        body = {
            "model": "tiny",
            "query": "q",
            "documents": ["ab", {"text": "abcd", "title": "x"}, "a"],
            "top_n": 2,
        }
        ranked = (await stack.http.post("/v2/rerank", json={**body, "return_documents": True})).json()
        scored = (
            await stack.http.post(
                "/v1/score", json={"model": "tiny", "text_1": ["q", "rr"], "text_2": ["a", "b"]}
            )
        ).json()
    assert [(each["index"], each["document"]["text"]) for each in ranked["results"]] == [
        (1, "abcd"),
        (0, "ab"),
    ]
    assert [each["relevance_score"] for each in ranked["results"]] == pytest.approx([0.5, 0.3])
    assert ranked["meta"]["api_version"]["version"] == "2"
    assert [each["score"] for each in scored["data"]] == pytest.approx([0.2, 0.3])
    starts = [text.second_start for submit in engine.submissions for text in submit.pooling.texts]
    assert starts == [1, 1, 1, 1, 2]


async def test_a_model_of_embeddings_ranks_by_cosine() -> None:
    async with deployed(PoolingEngine(), tokenizer=PoolingTokenizer()) as stack:
        body = {"model": "tiny", "query": "abc", "documents": ["xyz", "abc"]}
        ranked = (await stack.http.post("/v1/rerank", json=body)).json()
    assert ranked["results"][0]["index"] == 1
    assert ranked["results"][0]["relevance_score"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("tokenizer", "path", "body", "told"),
    [
        (ByteTokenizer(), "/v1/embeddings", {"input": "a"}, "it can generate"),
        (ByteTokenizer(), "/v1/rerank", {"query": "a", "documents": ["b"]}, "it can generate"),
        (PoolingTokenizer(), "/v1/classify", {"input": "a"}, "it can embed"),
        (PoolingTokenizer(), "/v1/completions", {"prompt": "a"}, "it can embed"),
        (
            PoolingTokenizer(),
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}]},
            "embed",
        ),
        (PoolingTokenizer(), "/v1/responses", {"input": "a"}, "it can embed"),
        (PoolingTokenizer(), "/v1/responses/input_tokens", {"input": "a"}, "it can embed"),
    ],
)
async def test_what_a_model_cannot_do_is_refused_with_what_it_can(
    tokenizer: ByteTokenizer, path: str, body: dict[str, Any], told: str
) -> None:
    async with deployed(PoolingEngine(), tokenizer=tokenizer) as stack:
        answer = await stack.http.post(path, json={"model": "tiny", **body})
        cards = (await stack.http.get("/v1/models")).json()["data"]
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "model"
    assert told in answer.json()["error"]["message"]
    assert cards[0]["tasks"] == (["embed"] if isinstance(tokenizer, PoolingTokenizer) else ["generate"])


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("encoding_format", "'wrong' is not one of base64, float"),
        ("truncate", "'wrong' is not one of END, NONE, START"),
    ],
)
async def test_a_word_that_is_none_of_a_fields_is_told_which_are(field: str, told: str) -> None:
    async with deployed(PoolingEngine(), tokenizer=PoolingTokenizer()) as stack:
        body = {"model": "tiny", "input": "a", field: "wrong"}
        error = (await stack.http.post("/v1/embeddings", json=body)).json()["error"]
    assert (error["param"], error["message"]) == (field, f"{field}: {told}")


async def test_one_texts_refusal_is_the_requests_and_names_it() -> None:
    engine = PoolingEngine(refusal=MillraceError(Reason.INVALID_ARGUMENT, "prompt: no", field="prompt"))
    async with deployed(engine, tokenizer=PoolingTokenizer()) as stack:
        answer = await stack.http.post("/v1/embeddings", json={"model": "tiny", "input": ["a"]})
        many = await stack.http.post("/v1/embeddings", json={"model": "tiny", "input": ["a"] * 2049})
        empty = await stack.http.post("/v1/embeddings", json={"model": "tiny", "input": ["a", ""]})
        assert stack.gateway.num_open == 0
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0]")
    assert "2048" in many.json()["error"]["message"]
    assert empty.json()["error"]["param"] == "input[1]"


async def test_a_client_that_leaves_takes_all_texts_back() -> None:
    engine = PoolingEngine()
    engine.gate.clear()
    async with deployed(engine, tokenizer=PoolingTokenizer()) as stack:
        body = {"model": "tiny", "input": ["a", "b", "c"]}
        asking = asyncio.create_task(stack.http.post("/v1/embeddings", json=body))
        while not engine.left:
            await asyncio.sleep(0.005)
        asking.cancel()
        while not engine.cancels:
            await asyncio.sleep(0.005)


async def test_grpc_has_the_same() -> None:
    async with deployed(PoolingEngine(), tokenizer=PoolingTokenizer()) as stack:
        metadata = ((CONTEXT_HEADER, signed_context()),)
        inputs = [inference_pb2.PooledInput(text="abc"), inference_pb2.PooledInput(text="b")]
        request = inference_pb2.EmbedRequest(model="tiny", inputs=inputs)
        answer = await stack.inference.Embed(request, metadata=metadata)
        ranking = inference_pb2.RerankRequest(model="tiny", query="abc", documents=["xyz", "abc"])
        ranked = await stack.inference.Rerank(ranking, metadata=metadata)
    assert [len(each.values) for each in answer.embeddings] == [2, 2]
    assert answer.usage.prompt_tokens == 4
    assert ranked.results[0].index == 1
