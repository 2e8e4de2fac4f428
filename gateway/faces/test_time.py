"""`test_time`, which several APIs have in the same words: its body, and what their documents say of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.config import STRATEGIES
from gateway.faces.schemas import or_null, text
from gateway.types.deliberation import (
    MAX_DELIMITER,
    MAX_PATTERN,
    ON_FAILURE,
    SCORERS,
    Deliberation,
    ScorerSpec,
)


class ScorerBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`test_time.scorer`: by what samples are told apart."""

    type: str
    pattern: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    minimum: float | None = None
    maximum: float | None = None
    model: str | None = None


class DeliberationBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`test_time`: one answer is chosen among several samples."""

    strategy: str
    samples: int | None = None
    budget_tokens: int | None = None
    confidence: float | None = None
    scorer: ScorerBody | None = None
    on_failure: str | None = None
    model: str | None = None
    delimiter: str | None = None


def deliberation(body: DeliberationBody) -> Deliberation:
    """What a body asks for; limits are checked where all APIs' requests are."""
    return Deliberation(
        strategy=body.strategy,
        samples=body.samples,
        budget_tokens=body.budget_tokens,
        confidence=body.confidence,
        scorer=None if body.scorer is None else _scorer(body.scorer),
        on_failure=body.on_failure or "refuse",
        model=body.model or "",
        delimiter=body.delimiter or "",
    )


def _scorer(body: ScorerBody) -> ScorerSpec:
    schema = bytes(body.schema)
    return ScorerSpec(
        type=body.type,
        pattern=body.pattern or "",
        schema_json="" if schema == b"null" else schema.decode(),
        minimum=body.minimum,
        maximum=body.maximum,
        model=body.model or "",
    )


# What is to be known of fields that are served.
ACCEPTED: Mapping[str, str] = {
    "test_time": "where the tier has it (`[tiers.<name>.test_time]`); usage.test_time tells what was spent",
    "test_time.strategy": "`best_of` by `scorer` (likelihood, number, regex, schema, model, "
    "verifier); "
    "`self_consistency` and `deepconf` vote on what `scorer` finds in answers (auto, boxed, number, json, "
    "regex), which a served `scorer.model` may weigh in `self_consistency`; `escalate` asks `model` where "
    "the first model, or `scorer`, gives less than `confidence`; "
    "`critique_revise` has up to `samples` drafts, until a critique says that nothing is wrong, or has what "
    "`scorer` (regex) names; `search` keeps a quarter of `samples` steps, each up to `delimiter` (a line), "
    "by `scorer` (likelihood, model, verifier)",
    "test_time.on_failure": "`refuse`, or `answer`: the plain answer, with the reason in usage",
}
# Rules that no schema can state, by the field of the error.
BEYOND: Mapping[str, str] = {
    r"test_time(\..*)?": "the tier has the strategy and so much of it, a scorer has the parts of its type "
    "and belongs to the strategy, and nothing else says how many answers are computed",
    r"temperature": "samples are drawn, so that beside votes and best_of of test_time it is above 0",
}
_COUNT = {"type": "integer", "minimum": 1}
# Fields that say less by their type than is demanded of them.
SCHEMAS: Mapping[type[msgspec.Struct], Mapping[str, Any]] = {
    ScorerBody: {
        "type": {"enum": list(SCORERS)},
        "pattern": or_null(text(MAX_PATTERN)),
        "schema": or_null({"type": "object"}),
    },
    DeliberationBody: {
        "strategy": {"enum": list(STRATEGIES)},
        "samples": or_null({"type": "integer", "minimum": 2, "maximum": 128}),
        "budget_tokens": or_null(_COUNT),
        "confidence": or_null({"type": "number", "minimum": 0.01, "maximum": 0.999}),
        "on_failure": {"enum": [*ON_FAILURE, None]},
        "delimiter": or_null(text(MAX_DELIMITER)),
    },
}
