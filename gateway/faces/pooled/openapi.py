"""The OpenAPI document of the endpoints for models that pool, made from the types that requests are decoded
with.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from contract.errors import Reason
from gateway.faces.pooled import answer_types as answers
from gateway.faces.pooled import bodies
from gateway.faces.pooled.bodies import POOLED_FIELDS
from gateway.faces.schemas import (
    REASONS,
    REF,
    answer_schemas,
    by_status,
    framed,
    list_of,
    or_null,
    ref,
    text,
    told,
)
from gateway.models.catalog import MAX_MODEL_NAME
from gateway.pipeline.validate import MAX_METADATA_KEY, MAX_METADATA_VALUE
from gateway.types.request import MAX_METADATA

PATH = "/v1/embeddings/openapi.json"
# Rules that no schema can state: by the error's reason, and by its field as a regular expression.
BEYOND_REASONS: Mapping[Reason, str] = {
    Reason.CONTEXT_LENGTH_EXCEEDED: "a text fits into the model's window, unless it is cut",
    Reason.NEVER_FITS: "it fits into the engines' memory",
}
BEYOND: Mapping[str, str] = {
    r"model": "it is one with the endpoint's task among its tasks in /v1/models",
    r"dimensions": "the model is made for so many",
    r"prompt_name": "it is one of the model's instructions",
    r"input(\[\d+\])*": "ids are the vocabulary's; there are no more than gateway.request.max_inputs",
    r"documents": "there are no more than gateway.request.max_inputs",
    r"text_[12]": "there is one first text, or as many as second ones; max_inputs of both",
    r"metadata\.user": "it is what the field of that name says, where both are given",
    r"service_tier": "the key may use it",
}
_ABOUT = """Embeddings as OpenAI has them, rerankings as Cohere and Jina do, scores and classes as vLLM does.
Every field that is not listed is refused by name.

A body that its schema allows is served, or refused for what no schema can say: limits, names that are not
there, and

""" + "\n".join(f"- `{name}`: {rule}" for name, rule in (*BEYOND_REASONS.items(), *BEYOND.items()))
_GIVEN = text(least=1)
_COUNT = {"type": "integer", "minimum": 1}
_ID = {"type": "integer", "minimum": 0}
_IDS = list_of(_ID)
_INPUT = {"anyOf": [_GIVEN, _IDS, list_of({"anyOf": [_GIVEN, _IDS]})]}
_TEXTS = {"anyOf": [_GIVEN, list_of(_GIVEN)]}
_COMMON: Mapping[str, Any] = {
    "model": text(MAX_MODEL_NAME),
    "user": or_null(text(MAX_METADATA_VALUE)),
    "metadata": or_null(
        {
            "type": "object",
            "maxProperties": MAX_METADATA,
            "propertyNames": {"maxLength": MAX_METADATA_KEY},
            "additionalProperties": text(MAX_METADATA_VALUE),
        }
    ),
}
_FIELDS: Mapping[type[msgspec.Struct], Mapping[str, Any]] = {
    bodies.EmbeddingsBody: {"input": _INPUT, "dimensions": or_null(_COUNT)},
    bodies.RerankBody: {
        "query": _GIVEN,
        "documents": list_of({"anyOf": [_GIVEN, ref(bodies.DocumentBody)]}),
        "top_n": or_null(_COUNT),
    },
    bodies.DocumentBody: {"text": _GIVEN},
    bodies.ScoreBody: {"text_1": _TEXTS, "text_2": _TEXTS},
    bodies.ClassifyBody: {"input": _INPUT},
}
_BODIES = (bodies.EmbeddingsBody, bodies.RerankBody, bodies.ScoreBody, bodies.ClassifyBody)
_ENDPOINTS: Mapping[str, tuple[str, str, type, type, Mapping[str, Any]]] = {
    "/v1/embeddings": (
        "createEmbedding",
        "Make an embedding of each input",
        bodies.EmbeddingsBody,
        answers.EmbeddingList,
        {"model": "all-minilm", "input": ["Hello!", "Good morning!"]},
    ),
    **{
        path: (
            name,
            "Order documents by their relevance to a query",
            bodies.RerankBody,
            answers.Reranking,
            {"model": "reranker", "query": "Who sells fish?", "documents": ["A fishmonger.", "A tailor."]},
        )
        for path, name in (("/v1/rerank", "rerank"), ("/v2/rerank", "rerankV2"), ("/rerank", "rerankPlain"))
    },
    **{
        path: (
            name,
            "Score pairs of texts",
            bodies.ScoreBody,
            answers.ScoreList,
            {"model": "reranker", "text_1": "Who sells fish?", "text_2": ["A fishmonger.", "A tailor."]},
        )
        for path, name in (("/v1/score", "score"), ("/score", "scorePlain"))
    },
    **{
        path: (
            name,
            "Classify texts",
            bodies.ClassifyBody,
            answers.ClassList,
            {"model": "classifier", "input": "What a day!"},
        )
        for path, name in (("/v1/classify", "classify"), ("/classify", "classifyPlain"))
    },
}


class PooledError(msgspec.Struct, frozen=True):
    """`error` has message, type, param, code and reason, as in /openapi.json."""

    error: dict[str, Any]


@cache
def document() -> bytes:
    """The document as JSON."""
    paths: dict[str, Any] = {}
    for path, (name, summary, body, answer, example) in _ENDPOINTS.items():
        content = {"schema": ref(body), "examples": {"texts": {"value": example}}}
        asked = {"required": True, "content": {"application/json": content}}
        paths[path] = {"post": {**_operation(name, summary, answer), "requestBody": asked}}
    paths[PATH] = {"get": {**_operation("describePooled", "Show this document"), "security": []}}
    kinds = (answers.EmbeddingList, answers.Reranking, answers.ScoreList, answers.ClassList, PooledError)
    return framed(
        "Millrace: Embeddings and scores",
        _ABOUT,
        paths=paths,
        components={"schemas": {**_body_schemas(), **answer_schemas(kinds)}},
        beyond_reasons=BEYOND_REASONS,
        beyond=BEYOND,
    )


def _operation(name: str, summary: str, answer: type | None = None) -> dict[str, Any]:
    schema = {"type": "object"} if answer is None else ref(answer)
    answered = {"description": "The answer.", "content": {"application/json": {"schema": schema}}}
    content = {"application/json": {"schema": ref(PooledError)}}
    statuses = by_status((*REASONS, Reason.TENANT_NOT_ALLOWED), lambda reason: reason.mapping.http_status)
    refusals = {
        status: {"description": told(reasons), "content": content} for status, reasons in statuses.items()
    }
    return {"operationId": name, "summary": summary, "responses": {"200": answered, **refusals}}


def _body_schemas() -> dict[str, dict[str, Any]]:
    """The schema of every type that a body is made of, by the type's name."""
    _, found = msgspec.json.schema_components(_BODIES, ref_template=REF)
    for body in _BODIES:
        properties = found[body.__name__]["properties"]
        properties |= {name: POOLED_FIELDS.described(name) for name in POOLED_FIELDS.names}
        properties |= _COMMON
    for kind, fields in _FIELDS.items():
        found[kind.__name__]["properties"].update(fields)
    return found
