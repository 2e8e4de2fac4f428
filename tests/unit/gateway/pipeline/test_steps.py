"""What was decided of a request is told while it runs, not when it has ended."""

from __future__ import annotations

from observability.emit import names
from tests.unit.gateway.rig.deployment import deployed
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.vocabulary import encode

BODY = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "hi"}]}


async def test_steps_of_a_request_are_counted_while_its_answer_is_still_on_its_way() -> None:
    engine = ScriptedEngine(reply=lambda submit, choice: encode("x") * 4000, step_s=0.01)
    async with (
        deployed(engine, tables={"gateway": {"drain_limit_s": 0.1}}) as stack,
        stack.http.stream("POST", "/v1/chat/completions", json=BODY) as response,
    ):
        await anext(response.aiter_lines())
        assert stack.gateway.num_open == 1
        exposed = (await stack.http.get("/metrics")).text.splitlines()
        # A gauge that is set when an answer ends would overwrite what was expected of later requests.
        for metric in (names.EXPECTED_WAIT, names.ROUTED, names.PREPARE_SECONDS):
            assert any(line.startswith(metric.name) for line in exposed), metric.name
