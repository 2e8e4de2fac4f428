"""Fields of the Responses API that are not served, or have no effect (see Unserved)."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.faces import retention, test_time, timings
from gateway.faces.options import EFFORT_ACCEPTED
from gateway.faces.unserved import Unserved

REFUSED: Mapping[str, str] = {
    "prompt": "prompts are not kept; send instructions and input",
    "max_tool_calls": "a request has one turn of calls; parallel_tool_calls false allows one call",
    "context_management": "compact the conversation with /v1/responses/compact",
    "moderation": "moderation is not served",
    "reasoning_effort": "send reasoning.effort",
    "max_tokens": "send max_output_tokens",
    "max_completion_tokens": "send max_output_tokens",
    "truncate_prompt_tokens": "send truncation auto",
}
WITHOUT_EFFECT: Mapping[str, str] = {
    "prompt_cache_retention": "prefixes are kept as long as there is room",
    "prompt_cache_options": "prefixes are kept as long as there is room",
    "client_metadata": "send metadata, which the ledger keeps",
}
FIELDS = Unserved(refused=REFUSED, harmless={}, without_effect=WITHOUT_EFFECT, remedies={})
# What of a served field is to be known beside its name.
ACCEPTED: Mapping[str, str] = {
    "input[].type": "messages, reasoning, calls of function and custom tools and their outputs, compactions; "
    "other items are refused by their type",
    "input[].encrypted_content": "what was sealed here for the same tenant",
    "input[].content[].type": "text and refusals; images and files are refused by their type",
    "tools[].type": "function, custom, and namespaces of both; web_search, image_generation and tool_search "
    "are set aside with a warning; other hosted tools are refused by their type",
    "tools[].format": "a grammar, lark or regex, leads the input in the form that the model writes calls in; "
    "one that is none is refused, and one that cannot be led there told in x-millrace-warning",
    "text.verbosity": '"medium" alone; other values are refused',
    "reasoning.summary": "thoughts are not summarised but given as they are, and a warning says so",
    "reasoning.generate_summary": "thoughts are not summarised but given as they are, and a warning says so",
    "stream_options.include_obfuscation": "false alone; true is refused",
    "truncation": "auto leaves out the oldest turns, and results without their calls, and says so in "
    "`left_out` of the response and x-millrace-warning",
    "cache_salt": "prefixes are shared with the tenant's requests of the same salt alone",
    "include_reasoning": "false leaves the text of thoughts out; encrypted_content is there where asked for",
    "reasoning.effort": f"`none` ends thinking; any other is {EFFORT_ACCEPTED}",
    **timings.ACCEPTED,
    **test_time.ACCEPTED,
    **retention.ACCEPTED,
    "store": "the answer's own store tells whether it is kept (gateway.store.tenants)",
    "background": "where answers are kept; text comes in pieces, or whole with log-probabilities",
    "previous_response_id": "where answers are kept, and over a WebSocket its last response; "
    "instructions are of one turn",
    "conversation": "where answers are kept; not beside previous_response_id",
    "input[].id": "an item_reference's item is looked up where answers are kept",
}
