"""A check for schemathesis: a body that its schema allows is refused only for what the document lists.

As a module of hooks it also gives bodies a model that is there, where CLIENTS_SERVED names one: otherwise
almost nothing would get beyond the question whether there is such a model.
"""

from __future__ import annotations

import os
import re

import schemathesis

SERVED = os.environ.get("CLIENTS_SERVED", "")
MAX_TOKENS = 8

# Statuses that judge a body; others are about keys, limits, names and the server.
_JUDGES = (400, 413, 422)


@schemathesis.check
def only_beyond_schema(ctx: object, response: object, case: object) -> None:
    """Raises AssertionError for another refusal."""
    del ctx
    if case.meta is None or not case.meta.generation.mode.is_positive or response.status_code not in _JUDGES:
        return
    error = response.json()["error"]
    # Anthropic's form has both in its details.
    details = error.get("details", {})
    reason = error.get("reason") or details["error_code"].upper()
    param = error.get("param") or details.get("field") or "?"
    for each in case.operation.schema.raw_schema["x-beyond-schema"]:
        if each.get("reason") == reason or re.match(each.get("param", "^$"), param, re.DOTALL):
            return
    raise AssertionError(f"the schema allows what is refused: {param}: {error['message']}")


def served(body: object, model: str, path: str) -> object:
    """The body of a request to `path` with this model, and few tokens asked for."""
    if not isinstance(body, dict) or "model" not in body:
        return body
    asked = {**body, "model": model}
    if path.startswith("/v1/responses/"):
        return asked
    if path.startswith("/v1/") and not path.endswith("/count_tokens"):
        other = "max_output_tokens" if path == "/v1/responses" else "max_completion_tokens"
        is_named_so = path == "/v1/responses" or asked.get(other) is not None
        name = other if is_named_so else "max_tokens"
        given = asked.get(name)
        asked[name] = MAX_TOKENS if given is None else min(given, MAX_TOKENS)
    return asked


if SERVED:

    @schemathesis.hook
    def map_body(context: object, body: object) -> object:
        """See the module."""
        return served(body, SERVED, context.operation.path)
