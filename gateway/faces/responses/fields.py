"""Fields of the Responses API that are not served, or have no effect (see Unserved)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.faces.unserved import Unserved

REFUSED: Mapping[str, str] = {
    "background": "answers are not kept; leave it out or send false, and stream the answer",
    "previous_response_id": "answers are not kept; send the earlier items in input",
    "conversation": "conversations are not kept; send the earlier items in input",
    "prompt": "prompts are not kept; send instructions and input",
    "max_tool_calls": "a request has one turn of calls; parallel_tool_calls false allows one call",
    "context_management": "compact the conversation with /v1/responses/compact",
    "moderation": "moderation is not served",
}
# Values that are accepted because they ask for what happens anyway.
HARMLESS_VALUES: Mapping[str, tuple[Any, ...]] = {"background": (False,)}
WITHOUT_EFFECT: Mapping[str, str] = {
    "prompt_cache_retention": "prefixes are kept as long as there is room",
    "prompt_cache_options": "prefixes are kept as long as there is room",
    "client_metadata": "send metadata, which the ledger keeps",
}
UNSERVED = Unserved(refused=REFUSED, harmless=HARMLESS_VALUES, without_effect=WITHOUT_EFFECT)
