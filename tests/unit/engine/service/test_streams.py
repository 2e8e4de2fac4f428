"""What waits for a gateway: steps that end while one is written go together, in order."""

from __future__ import annotations

from millrace.engine.v1 import engine_pb2

from engine.service.dispatcher import GatewayStream


async def test_steps_that_wait_go_together_behind_the_welcome() -> None:
    stream = GatewayStream("gateway", 100, lambda: None)
    stream.welcome(engine_pb2.EngineInfo(model="m"), {})
    stream.put(1, [{"handle": 7, "token_ids": [1]}, {"handle": 8, "token_ids": [2]}], {"num_running": 2}, 0.0)
    stream.kv_events.append(engine_pb2.KvEvent())
    stream.put(2, [{"handle": 7, "token_ids": [3]}], None, 0.0)
    stream.end()
    welcome, joined = [message async for message in stream.messages()]
    assert welcome.welcome.info.model == "m"
    assert [(each.handle, list(each.token_ids)) for each in joined.outputs.outputs] == [
        (7, [1]),
        (8, [2]),
        (7, [3]),
    ]
    assert joined.outputs.step_id == 2
    assert joined.outputs.load.num_running == 2, "a step that says nothing of the load leaves what was said"
    assert len(joined.outputs.kv_events) == 1
