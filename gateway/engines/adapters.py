"""Adapters of a model, added, removed and listed while its engines serve: by all of them, or not at all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import grpc
from millrace.engine.v1 import engine_pb2, engine_pb2_grpc

from contract.errors import MillraceError, Reason
from contract.proto.status import from_rpc_error
from gateway.engines.attachment import Attachment
from runtime.channels import connect

_log = logging.getLogger(__name__)

Ask = Callable[[Any], Awaitable[Any]]
# An adapter is read from disk and checked before the call is answered.
_LIMIT_S = 60.0


async def add_adapter(engines: Sequence[Attachment], name: str, path: str) -> None:
    """Makes an adapter known to every engine. Raises what one of them says that refuses; then all serve under
    the name what they served before.
    """
    before = await _everywhere(engines, _paths)
    adding = partial(_add, name=name, path=path)
    answers = await _asked(engines, adding)
    failures = [each for each in answers if isinstance(each, BaseException)]
    if not failures:
        return
    for engine, former, answer in zip(engines, before, answers, strict=True):
        if isinstance(answer, BaseException):
            continue
        back = partial(_add, name=name, path=former[name]) if name in former else partial(_remove, name=name)
        for problem in await _asked([engine], back):
            if problem is not None:
                _log.error(
                    "engine %s keeps adapter %s, which others refuse: %s", engine.target, name, problem
                )
    raise failures[0]


async def remove_adapter(engines: Sequence[Attachment], name: str) -> None:
    """Has every engine take no further requests for an adapter."""
    await _everywhere(engines, partial(_remove, name=name))


async def list_adapters(engines: Sequence[Attachment]) -> dict[str, str]:
    """Path by name of every adapter that some engine serves."""
    found: dict[str, str] = {}
    for answer in await _everywhere(engines, _paths):
        found |= answer
    return found


async def _add(stub: Any, *, name: str, path: str) -> None:
    await stub.AddAdapter(engine_pb2.AddAdapterRequest(name=name, path=path), timeout=_LIMIT_S)


async def _remove(stub: Any, *, name: str) -> None:
    await stub.RemoveAdapter(engine_pb2.RemoveAdapterRequest(name=name), timeout=_LIMIT_S)


async def _paths(stub: Any) -> dict[str, str]:
    listed = await stub.ListAdapters(engine_pb2.ListAdaptersRequest(), timeout=_LIMIT_S)
    return {each.name: each.path for each in listed.adapters}


async def _everywhere(engines: Sequence[Attachment], ask: Ask) -> list[Any]:
    """What all engines answer; raises the first failure."""
    if not engines:
        raise MillraceError(
            Reason.ENGINE_UNAVAILABLE, "no engine of this model is attached; try again", retry_after_s=1.0
        )
    answers = await _asked(engines, ask)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


async def _asked(engines: Sequence[Attachment], ask: Ask) -> list[Any]:
    """What every engine answers, or how it fails."""
    return await asyncio.gather(*(_ask(each, ask) for each in engines), return_exceptions=True)


async def _ask(engine: Attachment, ask: Ask) -> Any:
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
