"""The endpoints of OpenAI's API that are served, and their paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.faces.openai import openapi
from gateway.faces.openai.adapters import AdapterEndpoints
from gateway.faces.openai.generate import GenerateEndpoints
from gateway.faces.openai.inspect import MODELS_PREFIX, InspectEndpoints
from gateway.http.application import Routes
from gateway.http.exchange import Exchange
from gateway.pipeline.pipeline import Pipeline

# Paths of OpenAI's API that are known and not served.
_NOT_SERVED: Mapping[str, str] = {
    "/v1/moderations": "moderation is not served",
    "/v1/images/generations": "images are not served",
    "/v1/audio/speech": "audio is not served",
    "/v1/audio/transcriptions": "audio is not served",
    "/v1/files": "files are not kept",
    "/v1/batches": "send requests under a lower service_tier instead",
    "/v1/assistants": "use /v1/responses",
    "/v1/edits": "use /v1/chat/completions",
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
        public={("GET", "/openapi.json"): describe},
        not_served=_NOT_SERVED,
    )
