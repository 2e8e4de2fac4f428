"""Answers that are chosen by a schema."""

from __future__ import annotations

from typing import Any

import pytest
from millrace.common.v1 import grammar_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

from contract.errors import MillraceError, Reason
from tests.unit.gateway.rig.deployment import deployed
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.tokenizer import ByteTokenizer
from tests.unit.gateway.test_time.test_stream import CHAT, TIER, ask, said, saying


class SchemaTokenizer(ByteTokenizer):
    """Finds valid what has an a."""

    async def ValidateOutput(self, request: Any, context: Any) -> Any:
        verdicts = [grammar_pb2.OutputVerdict(valid='"a"' in text) for text in request.texts]
        return tokenizer_pb2.ValidateOutputResponse(verdicts=verdicts)


async def test_a_schema_chooses() -> None:
    engine = ScriptedEngine(reply=saying('{"b": 1}', '```json\n{"a": 1}\n```'))
    async with deployed(engine, tokenizer=SchemaTokenizer(), tables=TIER) as stack:
        scorer = {"type": "schema", "schema": {"required": ["a"]}}
        text, _ = said(CHAT, await ask(stack, strategy="best_of", samples=4, scorer=scorer))
    assert '"a"' in text


class RefusingTokenizer(ByteTokenizer):
    """Compiles no schema, for a reason."""

    def __init__(self, error: MillraceError) -> None:
        super().__init__()
        self._error = error

    async def ValidateOutput(self, request: Any, context: Any) -> Any:
        raise self._error


@pytest.mark.parametrize("on_failure", ["answer", "refuse"])
async def test_a_schema_that_is_none_is_refused_before_a_sample_is_paid_for(
    on_failure: str,
) -> None:
    engine = ScriptedEngine(reply=saying('{"b": 1}'))
    tokenizer = RefusingTokenizer(
        MillraceError(Reason.GRAMMAR_REFUSED, "type 5 is none", field="schema_json")
    )
    async with deployed(engine, tokenizer=tokenizer, tables=TIER) as stack:
        scorer = {"type": "schema", "schema": {"type": 5}}
        refused = await ask(stack, strategy="best_of", samples=4, scorer=scorer, on_failure=on_failure)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "test_time.scorer.schema")
    assert "type 5 is none" in refused.json()["error"]["message"]
    assert not engine.submissions
