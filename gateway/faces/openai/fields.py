"""Fields of OpenAI's API and of its widespread extensions that are not served: refused by name.

A field that is not declared at all is refused as unknown; one that has no effect here is named in a warning
header. Nothing is ignored in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.faces import retention, test_time
from gateway.faces.options import EFFORT_ACCEPTED
from gateway.faces.unserved import Unserved

REFUSED: Mapping[str, str] = {
    "audio": "audio output is not served",
    "function_call": "deprecated by OpenAI; use tool_choice",
    "functions": "deprecated by OpenAI; use tools",
    "verbosity": "the served models have no such switch; ask for it in the prompt",
    "web_search_options": "web search is not served; call a search tool through tools",
    "suffix": "filling in the middle is not served",
    "priority": "priorities come from service tiers; use service_tier",
    "include_stop_str_in_output": "the stop string is never part of the answer; stop_reason names it",
    "use_beam_search": "use beam_width",
    "length_penalty": "beams are ranked by mean log-probability",
    "logits_processors": "code from clients is not run; use logit_bias or response_format",
    "bad_words": "use logit_bias",
    "guided_decoding_backend": "there is one backend",
    "guided_whitespace_pattern": "put white space into the schema or grammar",
    "chat_template": "templates come with the checkpoint; name one of them with template_name",
    "mm_processor_kwargs": "only text is served",
    "return_tokens_as_token_ids": "use /tokenize, or the gRPC face, which returns token ids",
    "return_token_ids": "use /tokenize, or the gRPC face, which returns token ids",
    "thinking_token_budget": "use max_thinking_tokens",
    "thinking": "use max_thinking_tokens; reasoning_effort none ends all thinking",
    "include_reasoning": "thoughts are told apart in /v1/chat/completions alone",
    "max_thinking_tokens": "thoughts are told apart in /v1/chat/completions alone",
    "test_time": "samples of one answer are chosen from in /v1/chat/completions, responses and messages",
    "request_id": "send the header x-request-id",
    "prompt_logprobs": "use /v1/completions with echo and logprobs, or Generate of the gRPC face",
    "kv_transfer_params": "engines decide where keys and values live",
    "moderation": "moderation is not served",
    "background": "answers are computed in the background by /v1/responses",
    "previous_response_id": "send all messages, or use /v1/responses",
    "conversation": "send all messages, or use /v1/responses",
    "reasoning": "send reasoning_effort",
    "max_output_tokens": "send max_completion_tokens or max_tokens",
    "truncation": "send truncate_prompt_tokens",
}

# Values that are accepted because they ask for what happens anyway.
HARMLESS_VALUES: Mapping[str, tuple[Any, ...]] = {
    "store": (False,),
    "background": (False,),
    "truncation": ("disabled",),
    "modalities": (["text"],),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "include_reasoning": (True,),
    "return_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "length_penalty": (1,),
    "return_tokens_as_token_ids": (False,),
    "priority": (0,),
}

_REMEDIES: Mapping[str, str] = {
    "store": "answers are not stored; leave it out or send false",
    "modalities": 'only text is served; leave it out or send ["text"]',
    "skip_special_tokens": "special tokens are never shown",
    "add_generation_prompt": "an answer is always begun; use continue_final_message to continue one",
}

WITHOUT_EFFECT: Mapping[str, str] = {
    "prompt_cache_retention": "prefixes are kept as long as there is room",
    "prompt_cache_options": "prefixes are kept as long as there is room",
    "prediction": "no draft is taken from clients",
    "spaces_between_special_tokens": "special tokens are never shown",
    "add_special_tokens": "the template decides",
}


# What is to be known of fields that are served.
ACCEPTED: Mapping[str, str] = {
    "cache_salt": "prefixes are shared with the tenant's requests of the same salt alone",
    "truncate_prompt_tokens": "of a longer conversation the oldest turns, of a longer prompt the beginning "
    "is left out, which `left_out` of the choice and `x-millrace-warning` tell; -1: to what the model has "
    "room for beside the answer",
    "reasoning_effort": f"`none` ends thinking; any other is {EFFORT_ACCEPTED}",
    "stream_options.include_obfuscation": "false alone; true is refused",
    "messages[].content[].type": "text, refusal and input_text; images, audio, videos and files are refused "
    "by their type",
    **dict.fromkeys(
        (f"messages[].content[].{kind}" for kind in ("image_url", "input_audio", "video_url", "file")),
        "null alone, as the model reads text only",
    ),
    "messages[].audio": "null alone, as SDKs copy it from answers",
    "messages[].function_call": "null alone, as SDKs copy it from answers",
    "messages[].annotations": "empty alone, as SDKs copy it from answers",
    "messages[].tool_calls[].index": "taken and not read, as SDKs copy it from streams",
    "tools[].type": "function; custom is refused by its type",
    "tools[].custom": "null alone",
    "tools[].function.strict": "true enforces the schema, or refuses one that cannot be",
    "tool_choice.type": "function and allowed_tools",
    "tool_choice.custom": "null alone",
    "response_format.type": "text, json_object, json_schema, regex, choice, lark and ebnf",
    "tool_choice.allowed_tools.tools[].type": "function alone",
    "messages[].tool_calls[].type": "function alone",
    **test_time.ACCEPTED,
    **retention.ACCEPTED,
}

FIELDS = Unserved(
    refused=REFUSED, harmless=HARMLESS_VALUES, remedies=_REMEDIES, without_effect=WITHOUT_EFFECT
)
