"""`kv`, which several APIs have in the same words: its body, and what their documents say of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from contract.retention import MOST_WINDOW_TOKENS, POLICIES, Retention
from gateway.faces.schemas import or_null
from gateway.pipeline.delta import Usage


class RetentionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kv`: what the answer may forget of its keys and values."""

    policy: str
    keep: float | None = None
    window_tokens: int | None = None
    if_possible: bool | None = None
    max_lost: float | None = None


class KvUsage(msgspec.Struct, frozen=True):
    """`kv` of `usage`: the share of its attention that the answer lost at most by what it forgot."""

    lost: Annotated[float, msgspec.Meta(ge=0, le=1)]


def kv_usage(usage: Usage) -> KvUsage | msgspec.UnsetType:
    """UNSET where it was not measured."""
    return msgspec.UNSET if usage.kv_lost is None else KvUsage(usage.kv_lost)


def retention(body: RetentionBody) -> Retention:
    """What a body asks for; limits are checked where all APIs' requests are."""
    return Retention(
        policy=body.policy,
        keep=body.keep,
        window_tokens=body.window_tokens,
        if_possible=bool(body.if_possible),
        max_lost=body.max_lost,
    )


# What is to be known of fields that are served.
ACCEPTED: Mapping[str, str] = {
    "kv": "what the answer may forget of its keys and values, within the tier's bounds "
    "(`[tiers.<name>.kv]`); unset: what the tier says, which by itself forgets nothing",
    "kv.policy": "`full`, or another, under which the prompt is computed whole and the answer looks at a "
    "part of it, three blocks at least: `window+sinks` at the first block of tokens and at the last ones, "
    "its own among them; `snapkv` and `h2o` at the tokens that had most of the attention of the prompt's "
    "last 32 tokens or of all, `kvzap` at those that a scorer trained for the model foresees to be looked at "
    "and the prompt's last 128, and these three at all of the answer",
    "kv.keep": "part of the prompt's tokens that are kept at a time; or `window_tokens`, their number",
    "kv.if_possible": "true: a model that can forget nothing forgets nothing, instead of a refusal",
    "kv.max_lost": "share of its attention that the answer may lose by what it forgets; usage.kv.lost tells "
    "what it lost at most. Beyond, it goes on with all of it, or ends with an error, as the tier says",
}
# Rules that no schema can state, by the field of the error.
BEYOND: Mapping[str, str] = {
    r"kv(\..*)?": "full has neither keep nor window_tokens, others one of them; tier, model and engine "
    "let the answer forget so much",
}
# Fields that say less by their type than is demanded of them.
SCHEMAS: Mapping[type[msgspec.Struct], Mapping[str, Any]] = {
    RetentionBody: {
        "policy": {"enum": list(POLICIES)},
        "keep": or_null({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
        "max_lost": or_null({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
        "window_tokens": or_null({"type": "integer", "minimum": 1, "maximum": MOST_WINDOW_TOKENS}),
    },
}
