"""The endpoints of OpenAI's API that are served, and their paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.batches.service import Batches
from gateway.faces.openai import batches_openapi, openapi
from gateway.faces.openai.adapters import AdapterEndpoints
from gateway.faces.openai.batches import BATCHES, BatchEndpoints
from gateway.faces.openai.files import FILES, FORM_BYTES, FileEndpoints
from gateway.faces.openai.generate import GenerateEndpoints
from gateway.faces.openai.inspect import MODELS_PREFIX, InspectEndpoints
from gateway.http.application import Routes
from gateway.http.exchange import Exchange
from gateway.pipeline.pipeline import Pipeline

_UNKEPT = "have the operator set gateway.batches.directory, or send requests under a lower service_tier"
# Paths of OpenAI's API that are known and not served.
_NOT_SERVED: Mapping[str, str] = {
    "/v1/moderations": "moderation is not served",
    "/v1/images/generations": "images are not served",
    "/v1/audio/speech": "audio is not served",
    "/v1/audio/transcriptions": "audio is not served",
    "/v1/assistants": "use /v1/responses",
    "/v1/edits": "use /v1/chat/completions",
    FILES: _UNKEPT,
    BATCHES: _UNKEPT,
}


def routes(pipeline: Callable[[], Pipeline], admin_tenants: tuple[str, ...] = ()) -> Routes:
    """The face. `pipeline` raises what to answer while there is none yet."""
    generate = GenerateEndpoints(pipeline)
    inspect, adapters = InspectEndpoints(pipeline), AdapterEndpoints(pipeline, admin_tenants)
    schema = openapi.document()

    async def describe(exchange: Exchange) -> None:
        await exchange.respond(200, schema)

    return Routes(
        exact={
            ("POST", "/v1/chat/completions"): generate.chat,
            ("POST", "/v1/completions"): generate.complete,
            ("GET", "/v1/models"): inspect.models,
            ("GET", "/v1/lora_adapters"): adapters.list,
            ("POST", "/v1/load_lora_adapter"): adapters.load,
            ("POST", "/v1/unload_lora_adapter"): adapters.unload,
            ("POST", "/tokenize"): inspect.tokenize,
            ("POST", "/detokenize"): inspect.detokenize,
        },
        below={MODELS_PREFIX: ("GET", inspect.model)},
        public={("GET", openapi.PATH): describe},
        batched=("/v1/chat/completions", "/v1/completions"),
        not_served=_NOT_SERVED,
    )


def batch_routes(pipeline: Callable[[], Pipeline], batches: Batches) -> Routes:
    """Files and batches."""
    files = FileEndpoints(batches)
    endpoints = BatchEndpoints(batches, lambda: pipeline().intake)
    schema = batches_openapi.document()

    async def describe(exchange: Exchange) -> None:
        await exchange.respond(200, schema)

    return Routes(
        exact={
            ("POST", FILES): files.create,
            ("GET", FILES): files.list,
            ("POST", BATCHES): endpoints.create,
            ("GET", BATCHES): endpoints.list,
        },
        below={f"{FILES}/": ("", files.handle), f"{BATCHES}/": ("", endpoints.handle)},
        public={("GET", batches_openapi.PATH): describe},
        uploads={FILES: batches.config.max_file_bytes + FORM_BYTES},
    )
