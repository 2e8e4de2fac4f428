"""Fields of OpenAI's API and of its widespread extensions that are not served: refused by name.

A field that is not declared at all is refused as unknown; one that has no effect here is named in a warning
header. Nothing is ignored in silence.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import msgspec

from contract.errors import unsupported
from contract.sampling import CommonOptions

# Response header that lists fields without effect.
WARNING_HEADER = b"x-millrace-warning"

_NULL = (b"", b"null")

REFUSED: Mapping[str, str] = {
    "audio": "audio output is not served",
    "function_call": "deprecated by OpenAI; use tool_choice",
    "functions": "deprecated by OpenAI; use tools",
    "verbosity": "the served models have no such switch; ask for it in the prompt",
    "web_search_options": "web search is not served; call a search tool through tools",
    "suffix": "filling in the middle is not served",
    "priority": "priorities come from service tiers; use service_tier",
    "cache_salt": "the salt is set by the tenant's configuration",
    "include_stop_str_in_output": "the stop string is never part of the answer; stop_reason names it",
    "use_beam_search": "use beam_width",
    "length_penalty": "beams are ranked by mean log-probability",
    "truncate_prompt_tokens": "a prompt is never truncated; shorten it",
    "logits_processors": "code from clients is not run; use logit_bias or response_format",
    "bad_words": "use logit_bias",
    "guided_decoding_backend": "there is one backend",
    "guided_whitespace_pattern": "put white space into the schema or grammar",
    "chat_template": "templates come with the checkpoint; name one of them with template_name",
    "mm_processor_kwargs": "only text is served",
    "return_tokens_as_token_ids": "use /tokenize, or the gRPC face, which returns token ids",
    "prompt_logprobs": "use /v1/completions with echo and logprobs, or Generate of the gRPC face",
    "kv_transfer_params": "engines decide where keys and values live",
}

# Value that is accepted because it asks for what happens anyway.
HARMLESS: Mapping[str, tuple[bytes, ...]] = {
    "store": (b"false",),
    "modalities": (b'["text"]',),
    "include_stop_str_in_output": (b"false",),
    "use_beam_search": (b"false",),
    "skip_special_tokens": (b"true",),
    "spaces_between_special_tokens": (b"true", b"false"),
    "add_generation_prompt": (b"true",),
    "add_special_tokens": (b"true", b"false"),
    "length_penalty": (b"1", b"1.0"),
    "return_tokens_as_token_ids": (b"false",),
    "priority": (b"0",),
}

_REMEDIES: Mapping[str, str] = {
    **REFUSED,
    "store": "answers are not stored; leave it out or send false",
    "modalities": 'only text is served; leave it out or send ["text"]',
    "skip_special_tokens": "special tokens are never shown",
    "add_generation_prompt": "an answer is always begun; use continue_final_message to continue one",
}

WITHOUT_EFFECT: Mapping[str, str] = {
    "prompt_cache_retention": "prefixes are kept as long as there is room",
    "prediction": "no draft is taken from clients",
    "spaces_between_special_tokens": "special tokens are never shown",
    "add_special_tokens": "the template decides",
}


class Unserved(CommonOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Declares the fields above, so that null, and values that change nothing, are accepted. Its bodies have
    sampling options, too, and a struct has one base.
    """

    audio: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    function_call: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    functions: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    verbosity: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    web_search_options: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    suffix: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    priority: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    cache_salt: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    include_stop_str_in_output: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    use_beam_search: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    length_penalty: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    truncate_prompt_tokens: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    logits_processors: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    bad_words: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    guided_decoding_backend: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    guided_whitespace_pattern: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    chat_template: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    mm_processor_kwargs: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    return_tokens_as_token_ids: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    prompt_logprobs: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    kv_transfer_params: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    store: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    modalities: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    skip_special_tokens: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    spaces_between_special_tokens: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    add_generation_prompt: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    add_special_tokens: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    prompt_cache_retention: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    prediction: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


UNSERVED = tuple(name for name in Unserved.__struct_fields__ if name not in CommonOptions.__struct_fields__)
_values = operator.attrgetter(*UNSERVED)
_UNSET = _values(Unserved())


def check_unserved(body: Unserved) -> list[str]:
    """Warnings for fields without effect; raises UNSUPPORTED_FIELD for one that asks for what is not
    served.
    """
    if _values(body) == _UNSET:
        return []
    warnings = []
    for name, value in zip(UNSERVED, _values(body), strict=True):
        raw = bytes(value)
        if raw in _NULL or raw in HARMLESS.get(name, ()):
            continue
        if name in WITHOUT_EFFECT:
            warnings.append(f"{name} has no effect: {WITHOUT_EFFECT[name]}")
            continue
        raise unsupported(name, _REMEDIES.get(name, "leave it out"))
    return warnings
