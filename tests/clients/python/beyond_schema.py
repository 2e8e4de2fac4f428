"""A check for schemathesis: a body that its schema allows is refused only for what the document lists."""

from __future__ import annotations

import re

import schemathesis

# Statuses that judge a body; others are about keys, limits, names and the server.
_JUDGES = (400, 413, 422)


@schemathesis.check
def only_beyond_schema(ctx: object, response: object, case: object) -> None:
    """Raises AssertionError for another refusal."""
    del ctx
    if case.meta is None or not case.meta.generation.mode.is_positive or response.status_code not in _JUDGES:
        return
    error = response.json()["error"]
    for each in case.operation.schema.raw_schema["x-beyond-schema"]:
        if each.get("reason") == error["reason"] or re.match(each.get("param", "^$"), error["param"] or "?"):
            return
    raise AssertionError(f"the schema allows what is refused: {error['param']}: {error['message']}")
