"""A refused call leaves nothing of its request to the garbage collector: it may be megabytes."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from millrace.inference.v1 import inference_pb2

from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import Deployment, deployed, signed_context
from tests.unit.leftovers import leftovers

METADATA = ((CONTEXT_HEADER, signed_context()),)


async def _refused(stack: Deployment) -> None:
    """What the tokenizer service refuses; its name of the field is not the caller's."""
    request = inference_pb2.ChatRequest(model="tiny")
    request.conversation.messages.add(role=2, content="hi")
    request.response_format.json_schema.schema_json = '{"type": "impossible"}'
    for _ in range(5):
        with pytest.raises(grpc.aio.AioRpcError, match="no such type"):
            async for _ in stack.inference.Chat(request, metadata=METADATA):
                pass
    async with asyncio.timeout(10):
        while stack.gateway.num_open:
            await asyncio.sleep(0)
    await stack.http.get("/metrics")


async def test_a_refusal_of_the_tokenizer_service_leaves_nothing_of_its_request() -> None:
    async with deployed() as stack:
        await _refused(stack)
        with leftovers() as found:
            await _refused(stack)
        # grpc.aio's own end of an aborted call holds the interceptor's, and that alone.
        assert {each for each in found if "interceptors.py" not in each} <= {"contract.errors.MillraceError"}
