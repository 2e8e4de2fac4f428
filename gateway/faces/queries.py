"""Paths with a parameter: what a query says, and which method has which handler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from contract.errors import MillraceError, Reason, invalid, unsupported
from gateway.http.errors import not_found
from gateway.http.exchange import Exchange

MAX_LIMIT, _DEFAULT_LIMIT = 100, 20
# Names in a query, of pages.
PAGE = ("limit", "order", "after")


class Query:
    """The query of a request, whose names are known; raises UNSUPPORTED_FIELD for others."""

    def __init__(self, exchange: Exchange, known: Sequence[str]) -> None:
        self._values = dict(parse_qsl(exchange.query, keep_blank_values=True))
        for name in self._values:
            if name not in known:
                raise unsupported(name, f"use {', '.join(known) or 'none'}", "no parameter of this path")

    def flag(self, name: str) -> bool:
        """Whether it is true; raises INVALID_ARGUMENT for what is no truth value."""
        value = self._values.get(name, "false").lower()
        if value not in ("true", "false"):
            raise invalid(name, f"{value[:20]!r} is neither true nor false")
        return value == "true"

    def number(self, name: str, otherwise: int, *, least: int = 1, most: int = 2**53) -> int:
        """A number; raises INVALID_ARGUMENT."""
        text = self._values.get(name)
        if text is None:
            return otherwise
        if not (text.isascii() and text.isdigit() and len(text) <= 16 and least <= int(text) <= most):
            raise invalid(name, f"{text[:20]!r} is no number from {least} to {most}")
        return int(text)

    def text(self, name: str, otherwise: str = "") -> str:
        """A text; `otherwise` where it is not there."""
        return self._values.get(name, otherwise)

    def page(self, *, otherwise: int = _DEFAULT_LIMIT, most: int = MAX_LIMIT) -> dict[str, Any]:
        """Which items are asked for; so many where it does not say, and at most."""
        order = self._values.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid("order", f"{order[:20]!r} is not one of asc, desc")
        limit = self.number("limit", otherwise, most=most)
        return {"limit": limit, "order": order, "after": self._values.get("after", "")}


async def dispatch(exchange: Exchange, handlers: Mapping[str, Any] | None, *names: str) -> None:
    """Has the handler of the method answer; raises ROUTE_NOT_FOUND and METHOD_NOT_ALLOWED."""
    if handlers is None or not all(names):
        raise not_found(exchange.path, {})
    method = "GET" if exchange.method == "HEAD" else exchange.method
    if method not in handlers:
        allowed = ", ".join(handlers)
        exchange.add_headers({"allow": allowed})
        message = f"{exchange.path} does not take {exchange.method}; use {allowed}"
        raise MillraceError(Reason.METHOD_NOT_ALLOWED, message)
    await handlers[method](exchange, *names)
