"""`truncation: auto`: the oldest turns of a conversation are left out where it is too long for the model."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from contract.chat import Conversation, Message, Role
from gateway.models.catalog import ServedModel
from gateway.pipeline.pipeline import Pipeline
from gateway.types.request import Caller, GenerationRequest

# Part of the context that is left to an answer of which no length was said.
_ANSWER_PART = 8
_KEPT = (Role.SYSTEM, Role.DEVELOPER)


async def truncated(
    pipeline: Pipeline, caller: Caller, request: GenerationRequest
) -> tuple[GenerationRequest, str]:
    """The request without as many of its oldest turns as must go, and a warning that says so, "" where none
    has to. A turn is what a user says and what follows; instructions and the last turn stay, without results
    of calls that were in those that go.
    """
    served = pipeline.model(caller, request.model)
    limit = pipeline.context_limit(caller, request, served)
    conversation = request.prompt
    assert isinstance(conversation, Conversation), "this API has conversations alone"
    turns = _turns(conversation.messages)
    most = limit - (request.sampling.max_tokens or limit // _ANSWER_PART)
    if not limit or len(turns) < 2 or await _length(pipeline, caller, served, request) <= most:
        return request, ""
    # Leaving out so many turns is too few, and so many is enough, or all that there are.
    too_few, enough = 0, len(turns) - 1
    while enough - too_few > 1:
        tried = (too_few + enough) // 2
        shorter = _without(request, conversation, turns[:tried])
        if await _length(pipeline, caller, served, shorter) <= most:
            enough = tried
        else:
            too_few = tried
    told = f"truncation left out the oldest {enough} of {len(turns)} turns, which the model has not seen"
    return _without(request, conversation, turns[:enough]), told


async def _length(pipeline: Pipeline, caller: Caller, served: ServedModel, request: GenerationRequest) -> int:
    return len(await pipeline.encode(caller, served, request))


def _turns(messages: Sequence[Message]) -> list[list[Message]]:
    turns: list[list[Message]] = []
    for message in messages:
        if message.role in _KEPT:
            continue
        if message.role is Role.USER or not turns:
            turns.append([])
        turns[-1].append(message)
    return turns


def _without(
    request: GenerationRequest, conversation: Conversation, turns: list[list[Message]]
) -> GenerationRequest:
    dropped = {id(message) for turn in turns for message in turn}
    left = [each for each in conversation.messages if id(each) not in dropped]
    gone = {call.id for turn in turns for message in turn for call in message.tool_calls}
    gone -= {call.id for each in left for call in each.tool_calls}
    # A result of a call that is not there says nothing, and templates refuse it.
    messages = tuple(each for each in left if each.role is not Role.TOOL or each.tool_call_id not in gone)
    return replace(request, prompt=replace(conversation, messages=messages))
