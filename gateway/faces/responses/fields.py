"""Fields of the Responses API that are not served, or have no effect (see Unserved)."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.faces.unserved import Unserved

REFUSED: Mapping[str, str] = {
    "prompt": "prompts are not kept; send instructions and input",
    "max_tool_calls": "a request has one turn of calls; parallel_tool_calls false allows one call",
    "context_management": "compact the conversation with /v1/responses/compact",
    "moderation": "moderation is not served",
}
WITHOUT_EFFECT: Mapping[str, str] = {
    "prompt_cache_retention": "prefixes are kept as long as there is room",
    "prompt_cache_options": "prefixes are kept as long as there is room",
    "client_metadata": "send metadata, which the ledger keeps",
}
UNSERVED = Unserved(refused=REFUSED, harmless={}, without_effect=WITHOUT_EFFECT)
