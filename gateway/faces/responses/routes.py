"""The endpoints of the Responses API that are served, and their paths."""

from __future__ import annotations

from collections.abc import Callable

from gateway.faces.responses.endpoints import ResponseEndpoints
from gateway.faces.sealed import Seal
from gateway.http.application import Routes
from gateway.pipeline.pipeline import Pipeline


def routes(pipeline: Callable[[], Pipeline], secret: bytes) -> Routes:
    """The face. `secret` is the deployment's, from which the key is derived for what clients keep for us."""
    endpoints = ResponseEndpoints(pipeline, Seal(secret, "millrace responses"))
    return Routes(
        exact={
            ("POST", "/v1/responses"): endpoints.create,
            ("POST", "/v1/responses/input_tokens"): endpoints.count,
            ("POST", "/v1/responses/compact"): endpoints.compact,
        }
    )
