"""What the OpenAPI document says of stored responses and conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.faces.queries import MAX_LIMIT
from gateway.faces.responses import answer_types as answers
from gateway.faces.responses.conversations import CONVERSATIONS, MAX_ITEMS
from gateway.faces.responses.items import InputItem
from gateway.faces.responses.stored import PREFIX
from gateway.faces.schemas import TEXT, list_of, ref

_OBJECT = {"type": "object"}
_RESPONSE, _CONVERSATION = f"{PREFIX}{{response_id}}", f"{CONVERSATIONS}/{{conversation_id}}"
_PAGE: Mapping[str, Mapping[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT},
    "order": {"enum": ["asc", "desc"]},
    "after": TEXT,
}
_FOLLOWED: Mapping[str, Mapping[str, Any]] = {
    "stream": {"type": "boolean"},
    "starting_after": {"type": "integer", "minimum": 0, "maximum": 2**53},
}
# By path and method: name, summary, parameters of the query.
_OPERATIONS: Mapping[tuple[str, str], tuple[str, str, Mapping[str, Any]]] = {
    (_RESPONSE, "get"): (
        "getResponse",
        "A stored response, or the events of one in the background",
        _FOLLOWED,
    ),
    (_RESPONSE, "delete"): ("deleteResponse", "Delete a stored response", {}),
    (f"{_RESPONSE}/cancel", "post"): ("cancelResponse", "Cancel a background response", {}),
    (f"{_RESPONSE}/input_items", "get"): ("listInputItems", "What a response was asked with", _PAGE),
    (CONVERSATIONS, "post"): ("createConversation", "Begin a conversation", {}),
    (_CONVERSATION, "get"): ("getConversation", "A conversation", {}),
    (_CONVERSATION, "post"): ("updateConversation", "Replace a conversation's metadata", {}),
    (_CONVERSATION, "delete"): ("deleteConversation", "Delete a conversation with its items", {}),
    (f"{_CONVERSATION}/items", "get"): ("listItems", "Items of a conversation", _PAGE),
    (f"{_CONVERSATION}/items", "post"): ("createItems", "Add items to a conversation", {}),
    (f"{_CONVERSATION}/items/{{item_id}}", "get"): ("getItem", "One item", {}),
    (f"{_CONVERSATION}/items/{{item_id}}", "delete"): ("deleteItem", "Delete one item", {}),
}


def stored_paths(metadata: Mapping[str, Any], refusals: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The operations by path. `metadata` is the schema of that field, `refusals` are answers by status."""
    items = {"items": {**list_of(ref(InputItem), 0), "maxItems": MAX_ITEMS}}
    bodies = {
        "createConversation": _body({"metadata": metadata, **items}),
        "updateConversation": _body({"metadata": metadata}, "metadata"),
        "createItems": _body(items, "items"),
    }
    paths: dict[str, dict[str, Any]] = {}
    for (path, method), (name, summary, query) in _OPERATIONS.items():
        named = [each.partition("}")[0] for each in path.split("{")[1:]]
        ids = {"type": "string", "minLength": 1, "pattern": "^[A-Za-z0-9_-]+$"}
        given = [{"name": each, "in": "path", "required": True, "schema": ids} for each in named]
        given += [{"name": each, "in": "query", "schema": schema} for each, schema in query.items()]
        content: dict[str, Any] = {"application/json": {"schema": _OBJECT}}
        if name in ("getResponse", "cancelResponse"):
            content = {"application/json": {"schema": ref(answers.Response)}}
        if name == "getResponse":
            content["text/event-stream"] = {"schema": {"description": "Its events, as of createResponse."}}
        answer = {"200": {"description": "The answer.", "content": content}, **refusals}
        operation = {"operationId": name, "summary": summary, "parameters": given, "responses": answer}
        paths.setdefault(path, {})[method] = operation | bodies.get(name, {})
    return paths


def _body(properties: Mapping[str, Any], *required: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
