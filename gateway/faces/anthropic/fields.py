"""Fields of Anthropic's API that are not served: refused by name, or named in a warning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.faces import retention, test_time, timings
from gateway.faces.options import EFFORT_ACCEPTED
from gateway.faces.unserved import Unserved

REFUSED: Mapping[str, str] = {
    "container": "code is not run here; call a tool of your own",
    "mcp_servers": "MCP servers are not called from here; list their tools in tools and call them yourself",
    "fallbacks": "the tier's configuration says which model answers instead",
    "fallback_credit_token": "there are no such credits",
    "inference_geo": "requests are served where this deployment runs",
    "speed": "use service_tier",
    "compaction": "conversations are not summarized; send the turns that are to be read",
    "thread": "conversations are not kept; send all turns",
    "store": "messages are not kept; leave it out, or use /v1/responses",
    "background": "use /v1/messages/batches or /v1/responses",
    "previous_response_id": "send all turns, or use /v1/responses",
    "conversation": "send all turns, or use /v1/responses",
    "reasoning_effort": "send output_config.effort",
    "max_thinking_tokens": "send thinking.budget_tokens",
    "truncation": "send truncate_prompt_tokens",
    "billing_policy": "usage is billed by the tenant's configuration",
}

# Values that are accepted because they ask for what happens anyway.
HARMLESS_VALUES: Mapping[str, tuple[Any, ...]] = {
    "mcp_servers": ([],),
    "fallbacks": ([],),
    "speed": ("standard",),
    "store": (False,),
    "background": (False,),
    "truncation": ("disabled",),
}

WITHOUT_EFFECT: Mapping[str, str] = {
    "context_management": "every turn that is sent is read",
    "diagnostics": "usage.cache_read_input_tokens tells what was cached",
}

FIELDS = Unserved(refused=REFUSED, harmless=HARMLESS_VALUES, remedies={}, without_effect=WITHOUT_EFFECT)

# What is to be known of fields that are served.
ACCEPTED: Mapping[str, str] = {
    "max_tokens": "at least 1; the answer ends earlier where the model's context does",
    "service_tier": "`auto` and `standard_only` are the caller's own tier; a tier's name asks for it",
    "cache_control": "wherever it stands; prefixes are cached anyway, and `usage.cache_read_input_tokens` "
    "tells how much was",
    "output_format": "as `output_config.format`",
    "messages[].content": "text, tool_use, tool_result, thinking and redacted_thinking blocks; images, "
    "documents and results of server tools are refused by type",
    "messages[].content[].data": "of redacted_thinking, which is not read: it is another server's",
    "messages[].content[].signature": "ours are checked; thinking with another has no effect",
    "messages[].content[].citations": "taken and not read, as SDKs send answers back",
    "messages[].content[].caller": "taken and not read, as SDKs send answers back",
    "tools[].type": "`custom`; server tools are refused",
    "tools[].eager_input_streaming": "arguments are sent as they come, valid or not; otherwise once they are "
    "whole",
    "thinking.type": "`enabled`, `adaptive` and `disabled`; without it the model's template decides",
    "thinking.budget_tokens": "less than `max_tokens`; kept to the token",
    "thinking.display": "`omitted` leaves the text out; the signature carries it to the next turn, sealed",
    "cache_salt": "prefixes are shared with the tenant's requests of the same salt alone",
    "truncate_prompt_tokens": "as in `/v1/chat/completions`; `left_out` of the message tells",
    "output_config.effort": EFFORT_ACCEPTED,
    **timings.ACCEPTED,
    **test_time.ACCEPTED,
    **retention.ACCEPTED,
    "metadata.user_id": "kept with the request's entry in the ledger",
}
