"""`/v1/completions`: the request's body to domain requests, one per prompt."""

from __future__ import annotations

from typing import Any, TypeGuard

import msgspec

from contract.chat import Prompt, TextPrompt, TokenPrompt
from contract.errors import invalid
from gateway.config import DEFAULT_REQUEST_LIMITS, RequestConfig
from gateway.faces.openai.fields import FIELDS
from gateway.faces.openai.requests import CommonBody, check_common, generation_request, sampling
from gateway.pipeline.validate import check_answers
from gateway.types.request import GenerationRequest

# OpenAI's default for this endpoint.
DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 128


class CompletionBody(CommonBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a completion request."""

    # A text, token ids, or a list of either.
    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    # OpenAI means the number of alternatives here.
    logprobs: int | None = None
    echo: bool | None = None
    # False leaves out what the tokenizer puts around a plain text, as in /tokenize.
    add_special_tokens: bool | None = None


DECODER = msgspec.json.Decoder(FIELDS.declared_in(CompletionBody))


def completion_requests(
    body: CompletionBody, *, limits: RequestConfig = DEFAULT_REQUEST_LIMITS
) -> list[GenerationRequest]:
    """One domain request per prompt, in order."""
    check_common(body)
    prompts = _prompts(body.prompt)
    if body.add_special_tokens is False:
        prompts = [_as_it_is(prompt) for prompt in prompts]
    echo = bool(body.echo)
    logprobs = body.logprobs
    options = sampling(body, max_tokens=body.max_tokens, logprobs=logprobs)
    if echo and logprobs is not None:
        # Echoed tokens have their log-probabilities too.
        options = msgspec.structs.replace(options, prompt_logprobs=logprobs)
    requests = [
        generation_request(body, prompt, options, echo=echo, num_prompts=0 if index else len(prompts))
        for index, prompt in enumerate(prompts)
    ]
    check_answers(requests[0], len(requests), limits)
    return requests


def _prompts(prompt: str | list[str | int | list[int]]) -> list[Prompt]:
    if isinstance(prompt, str):
        return [TextPrompt(prompt)]
    if not prompt:
        raise invalid("prompt", "it is empty; give a text or token ids")
    if _are_ids(prompt):
        return [TokenPrompt(tuple(prompt))]
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"{len(prompt)} prompts; the limit is {MAX_PROMPTS}")
    return [_one_prompt(each, f"prompt[{index}]") for index, each in enumerate(prompt)]


def _as_it_is(prompt: Prompt) -> Prompt:
    """A prompt to which no token is added; ids are such already."""
    return TextPrompt(prompt.text, add_special_tokens=False) if isinstance(prompt, TextPrompt) else prompt


def _one_prompt(prompt: str | int | list[int], field: str) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    if isinstance(prompt, list):
        return TokenPrompt(tuple(prompt))
    raise invalid(field, "a prompt is a text or a list of token ids")


def _are_ids(values: list[Any]) -> TypeGuard[list[int]]:
    # The types first: ids come by the hundred thousand.
    return set(map(type, values)) <= {int}
