"""Bodies of the endpoints for models that pool: OpenAI's of embeddings, Cohere's and Jina's of rerankings,
vLLM's of scores and classes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.faces.unserved import Unserved


class PooledCommon(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that all of them have."""

    model: str
    user: str | None = None
    service_tier: str | None = None
    metadata: dict[str, str] | None = None
    # What is cut of a text beyond the model's window; null: what the model's own files say.
    truncate: Literal["NONE", "START", "END"] | None = None


class EmbeddingsBody(PooledCommon, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/embeddings."""

    # A text, token ids, or a list of either.
    input: str | list[str | int | list[int]]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    # Name of one of the model's instructions; "" is none, and null the model's default.
    prompt_name: str | None = None


class DocumentBody(msgspec.Struct, frozen=True, kw_only=True):
    """A document with other fields beside its text, which say nothing here."""

    text: str


class RerankBody(PooledCommon, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/rerank, /v2/rerank and /rerank."""

    query: str
    documents: list[str | DocumentBody]
    top_n: int | None = None
    return_documents: bool | None = None


class ScoreBody(PooledCommon, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/score: one first text for all second ones, or one for each."""

    text_1: str | list[str]
    text_2: str | list[str]


class ClassifyBody(PooledCommon, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/classify."""

    input: str | list[str | int | list[int]]


POOLED_FIELDS = Unserved(
    refused={
        "rank_fields": "send each document as one text",
        "truncate_prompt_tokens": "use truncate",
        "input_type": "use prompt_name, by which the model's own instructions go",
        "embedding_types": "use encoding_format",
        "activation": "scores are what the checkpoint says",
        "stream": "the answer is one object",
    },
    harmless={"stream": (False,)},
    without_effect={
        "max_chunks_per_doc": "a document is read in one piece",
        "max_tokens_per_doc": "a document is as long as the model's window",
        "priority": "priorities come from service tiers; use service_tier",
    },
)
"""Fields that other servers have."""
