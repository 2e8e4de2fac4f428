"""What the endpoints for models that pool answer."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType


class PooledUsageBody(Struct, frozen=True, kw_only=True):
    """Tokens that were read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingBody(Struct, frozen=True, kw_only=True):
    """One embedding: numbers, or the base64 of their little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(Struct, frozen=True, kw_only=True):
    """Of all inputs, in their order."""

    object: Literal["list"] = "list"
    model: str
    data: list[EmbeddingBody]
    usage: PooledUsageBody


class RankedDocument(Struct, frozen=True, kw_only=True):
    """As it was sent."""

    text: str


class RankedBody(Struct, frozen=True, kw_only=True):
    """A document's place, and how relevant it is."""

    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class ApiVersionBody(Struct, frozen=True, kw_only=True):
    version: str


class BilledUnitsBody(Struct, frozen=True, kw_only=True):
    """One for a request: Cohere's unit. What is charged here are tokens."""

    search_units: int = 1


class RerankMeta(Struct, frozen=True, kw_only=True):
    api_version: ApiVersionBody
    billed_units: BilledUnitsBody


class Reranking(Struct, frozen=True, kw_only=True):
    """The most relevant document first."""

    id: str
    model: str
    results: list[RankedBody]
    meta: RerankMeta
    usage: PooledUsageBody


class ScoreEntry(Struct, frozen=True, kw_only=True):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreList(Struct, frozen=True, kw_only=True):
    """Of all pairs, in their order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreEntry]
    usage: PooledUsageBody


class ClassEntry(Struct, frozen=True, kw_only=True):
    """The most probable label, and the probabilities of all in the model's order."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassList(Struct, frozen=True, kw_only=True):
    """Of all inputs, in their order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassEntry]
    usage: PooledUsageBody
