"""Adapters of a model, added, removed and listed while its engines serve: by all of them, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from millrace.engine.v1 import engine_pb2, engine_pb2_grpc

from contract.errors import MillraceError, Reason
from contract.proto.status import from_rpc_error
from gateway.engines.attachment import Attachment
from services.channels import connect

# An adapter is read from disk and checked before the call is answered.
_LIMIT_S = 60.0


async def add_adapter(engines: Sequence[Attachment], name: str, path: str) -> None:
    """Makes an adapter known to every engine; raises what the first one that refuses says of it."""
    request = engine_pb2.AddAdapterRequest(name=name, path=path)
    await _everywhere(engines, lambda stub: stub.AddAdapter(request, timeout=_LIMIT_S))


async def remove_adapter(engines: Sequence[Attachment], name: str) -> None:
    """Has every engine take no further requests for an adapter."""
    request = engine_pb2.RemoveAdapterRequest(name=name)
    await _everywhere(engines, lambda stub: stub.RemoveAdapter(request, timeout=_LIMIT_S))


async def list_adapters(engines: Sequence[Attachment]) -> dict[str, str]:
    """Path by name of every adapter that some engine serves."""
    request = engine_pb2.ListAdaptersRequest()
    answers = await _everywhere(engines, lambda stub: stub.ListAdapters(request, timeout=_LIMIT_S))
    return {each.name: each.path for answer in answers for each in answer.adapters}


async def _everywhere(engines: Sequence[Attachment], ask: Callable[[Any], Awaitable[Any]]) -> list[Any]:
    if not engines:
        raise MillraceError(
            Reason.ENGINE_UNAVAILABLE, "no engine of this model is attached; try again", retry_after_s=1.0
        )

    async def one(engine: Attachment) -> Any:
        async with connect(engine.target) as channel:
            try:
                return await ask(engine_pb2_grpc.EngineServiceStub(channel))
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    raise MillraceError(
                        Reason.UNSUPPORTED_FIELD,
                        f"engine {engine.target} serves no adapters",
                        field="lora_name",
                    ) from error
                raise from_rpc_error(error, unavailable=Reason.ENGINE_UNAVAILABLE) from error

    answers = await asyncio.gather(*(one(each) for each in engines), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return list(answers)
