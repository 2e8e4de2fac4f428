"""The resource as it is before the first token: what was asked for, and by what values it is served."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.faces.responses.answer_types import Response
from gateway.faces.responses.requests import ResponseBody, TextBody
from gateway.faces.responses.tools import SET_ASIDE, OfferedTool
from gateway.faces.responses.writer import response_id
from gateway.pipeline.attempt import Attempt


def resource(body: ResponseBody, attempt: Attempt) -> Response:
    """The response in progress to an accepted request. Options that the client left out are those that the
    checkpoint, the configuration or the API sets.
    """
    info = attempt.info
    defaults = attempt.reader.defaults_of(attempt.call.request)

    def option(name: str, otherwise: float) -> float:
        given = getattr(body, name)
        return float(defaults.get(name, otherwise) if given is None else given)

    return Response(
        id=response_id(info.request_id),
        created_at=info.created_unix_s,
        status="in_progress",
        model=info.model,
        instructions=body.instructions,
        output=[],
        tools=[_tool(each) for each in body.tools or () if each.type not in SET_ASIDE],
        tool_choice="auto" if body.tool_choice is None else _said(body.tool_choice),
        truncation="auto" if body.truncation == "auto" else "disabled",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        text=_text(body.text or TextBody()),
        top_p=option("top_p", 1.0),
        presence_penalty=option("presence_penalty", 0.0),
        frequency_penalty=option("frequency_penalty", 0.0),
        top_logprobs=body.top_logprobs or 0,
        temperature=option("temperature", 1.0),
        reasoning=None
        if body.reasoning is None
        else {
            "effort": body.reasoning.effort,
            "summary": body.reasoning.summary or body.reasoning.generate_summary,
        },
        max_output_tokens=body.max_output_tokens,
        service_tier=attempt.call.tier.openai_name,
        metadata=body.metadata or {},
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
        left_out=info.left_out or msgspec.UNSET,
    )


def _tool(tool: OfferedTool) -> dict[str, Any]:
    if tool.type != "function":
        return dict(_said(tool))
    names = ("type", "name", "description", "parameters", "strict")
    return {name: getattr(tool, name) for name in names}


def _text(text: TextBody) -> dict[str, Any]:
    told: dict[str, Any] = {"type": "text"}
    form = text.format
    if form is not None and form.type == "json_schema":
        # The specification's type of a schema in an answer is null: a client has its own.
        told = {"name": form.name or "", "description": form.description, "schema": None}
        told |= {"type": form.type, "strict": bool(form.strict)}
    elif form is not None:
        told = {"type": form.type}
    return {"format": told, "verbosity": text.verbosity or "medium"}


def _said(value: Any) -> Any:
    """As it was sent, without what was not."""
    match msgspec.to_builtins(value):
        case dict() as fields:
            return {name: _said(each) for name, each in fields.items() if each is not None}
        case list() as items:
            return [_said(each) for each in items]
        case other:
            return other
