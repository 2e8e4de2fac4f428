"""Where the time of an answer that is one of several samples went."""

from __future__ import annotations

from typing import Any

import pytest

from contract.outputs import FirstToken
from gateway.engines.types import EngineOutput
from gateway.test_time.branch import RunningSample
from tests.unit.gateway.rig.deployment import deployed
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.vocabulary import encode
from tests.unit.gateway.test_time.test_stream import BODIES, CHAT, TIER, said, saying


@pytest.mark.parametrize(
    "test_time",
    [
        {"strategy": "best_of", "samples": 3},
        {"strategy": "self_consistency", "samples": 3},
        {"strategy": "search", "samples": 2, "scorer": {"type": "likelihood"}},
        {"strategy": "critique_revise"},
    ],
)
async def test_time_until_an_answer_is_chosen_is_a_part_of_its_own(test_time: dict[str, Any]) -> None:
    step_s, text = 0.004, "it is 7"
    engine = ScriptedEngine(reply=saying(text), step_s=step_s)
    async with deployed(engine, tables=TIER) as stack:
        body = {**BODIES[CHAT], "test_time": test_time, "include_timing": True}
        given, usage = said(CHAT, await stack.http.post(CHAT, json=body))
        plain_body = {**BODIES[CHAT], "include_timing": True}
        plain = said(CHAT, await stack.http.post(CHAT, json=plain_body))[1]
    assert given == text
    parts, timings = usage["time_to_first_token"], usage["timings"]
    assert parts["total_ms"] == pytest.approx(sum(ms for name, ms in parts.items() if name != "total_ms"))
    # After the first token of the first sample at least all others of it.
    assert parts["deliberation_ms"] >= len(encode(text)) * step_s * 1000
    assert timings["deliberation_ms"] == parts["deliberation_ms"]
    assert parts["first_decode_ms"] == 0.0, "as the engine says"
    # A token takes a step, however fast the chosen answer is passed on.
    assert 0 < timings["tokens_per_second"] <= 1 / step_s
    assert plain["time_to_first_token"]["deliberation_ms"] == 0.0
    assert plain["timings"]["tokens_per_second"] > 0


def test_the_pace_of_a_sample_is_the_engines_where_all_of_it_is_heard_at_once() -> None:
    class Unused:
        def cancel(self, reason: Any) -> None:
            raise AssertionError("it ends by itself")

    class Silent:
        def feed(self, output: EngineOutput) -> None:
            return None

    def sample(parent: RunningSample | None = None) -> RunningSample:
        made = RunningSample(0, Unused(), Silent(), None, parent=parent)  # type: ignore[arg-type]
        # The engine had the first token a tenth of a second ago.
        made.started_s -= 0.35
        first = FirstToken(queue_s=0.05, prefill_s=0.15, first_decode_s=0.05)
        made.take(EngineOutput(0, [1], first_token=first))
        for _ in range(20):
            made.take(EngineOutput(0, [2]))
        return made

    assert RunningSample(0, Unused(), Silent(), None).tpot_s is None  # type: ignore[arg-type]
    first = sample()
    assert first.tpot_s is not None
    assert first.tpot_s >= 0.1 / 20
    longer = sample(first).tpot_s
    assert longer is not None
    assert longer >= 0.2 / 40
