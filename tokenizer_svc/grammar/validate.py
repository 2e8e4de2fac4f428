"""Judges finished answers by their schema as it was sent, for what a grammar enforces in parts only.

Runs in a worker process: a schema's regular expressions may take any time.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs

from contract.grammar import Verdict
from tokenizer_svc.grammar.request import ValidationRequest, WorkerReply, WorkRefusal
from tokenizer_svc.grammar.schema.document import VALIDATORS, SchemaDocument

_FIELD = "schema_json"


def validate(request: ValidationRequest, *, max_depth: int) -> WorkerReply:
    """One verdict per text, or why the schema judges nothing."""
    try:
        schema = json.loads(request.schema_json)
        draft = SchemaDocument(schema, max_depth=max_depth).draft
        # Nothing is fetched, and messages do not repeat what a model wrote.
        validator = VALIDATORS[draft](schema, validate_formats=True, offline=True, mask="the value")
    except (ValueError, RecursionError, jsonschema_rs.ReferencingError) as error:
        return WorkerReply(
            refused=WorkRefusal(message=f"the schema cannot judge answers: {error}", field=_FIELD)
        )
    return WorkerReply(verdicts=tuple(_verdict(validator, text) for text in request.texts))


def _verdict(validator: Any, text: str) -> Verdict:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return Verdict(valid=False, message="the text is not JSON")
    for error in validator.iter_errors(value):
        path = [str(step) for step in error.schema_path]
        return Verdict(
            valid=False,
            keyword=path[-1] if path else "",
            schema_path=_pointer(path),
            instance_path=_pointer(error.instance_path),
            message=error.message,
        )
    return Verdict(valid=True)


def _pointer(path: Any) -> str:
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in path)
