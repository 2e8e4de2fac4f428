"""Pages as Anthropic's API asks for them, of batches and of models."""

from __future__ import annotations

from typing import NamedTuple

from contract.errors import invalid
from gateway.faces.queries import Query
from gateway.http.exchange import Exchange

MAX_PAGE = 1000
# What Anthropic's SDKs send to every path that they call a beta: it asks for nothing.
BETA = "beta"
BEFORE, AFTER = "before_id", "after_id"


class AskedPage(NamedTuple):
    """So many, and on which side of which one; "" where nothing was said. Never both."""

    limit: int
    before: str
    after: str


def asked_page(exchange: Exchange, usual: int) -> AskedPage:
    """The page that a query asks for, `usual` of them where it does not say. Raises UNSUPPORTED_FIELD and
    INVALID_ARGUMENT.
    """
    query = Query(exchange, ("limit", BEFORE, AFTER, BETA))
    asked = AskedPage(query.number("limit", usual, most=MAX_PAGE), query.text(BEFORE), query.text(AFTER))
    if asked.before and asked.after:
        raise invalid(BEFORE, f"give either {BEFORE} or {AFTER}")
    return asked
