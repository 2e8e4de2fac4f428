"""What the names of adapters stand for, at all engines of a model alike.

A name stands for one version, the digest of an adapter's files. Engines say what names stand for at them,
and of two statements that of the newer change holds (`AdapterInfo.order`). So every gateway comes to the same
set: one that starts anew learns it from the engines, and an engine that starts anew is given it by gateways.
Requests ask for the version of the moment when they are sent, and go on with it or not at all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import msgspec
from millrace.engine.v1 import engine_pb2, engine_pb2_grpc

from contract.engines import AdapterInfo
from contract.errors import MillraceError, Reason, invalid
from contract.proto.status import from_rpc_error
from gateway.engines.attachment import Attachment
from gateway.engines.types import Submission
from runtime.channels import connect

_log = logging.getLogger(__name__)

# For an operator's call: adapters are read from disk and checked.
_LIMIT_S = 60.0
# An engine that lacks something is given it after so many seconds, and then less and less often: whoever has
# changed a name gives it to all engines in the meantime.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.2, 5.0

# One engine's refusal of what a name stands for: by target and name, the change that it was about, and why.
_Refusals = dict[tuple[str, str], tuple[tuple[int, str], MillraceError]]


class AdapterNames:
    """Of every model that engines serve. `engines` finds those that are attached of a model, "" of any."""

    def __init__(self, engines: Callable[[str], Sequence[Attachment]]) -> None:
        self._engines = engines
        # By model, then by name. Kept when engines are gone: they are given it when they come back.
        self._newest: dict[str, dict[str, AdapterInfo]] = {}
        self._refusals: _Refusals = {}
        self._giving: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    def of(self, model: str) -> dict[str, AdapterInfo]:
        """What each name stands for, names included that stand for nothing any more; "" is any model."""
        if model:
            return self._newest.get(model, {})
        return {name: each for known in self._newest.values() for name, each in known.items()}

    # --- requests ---

    def asked_for(self, submission: Submission) -> Submission:
        """The submission with the version that its adapter stands for now. Raises MODEL_NOT_FOUND."""
        if not submission.adapter:
            return submission
        newest = self.of(submission.model).get(submission.adapter)
        if newest is not None and not newest.version:
            raise self._missing(submission, "it is not served any more")
        version = "" if newest is None else newest.version
        return msgspec.structs.replace(submission, adapter_version=version)

    def refusal(self, submission: Submission) -> MillraceError | None:
        """Why no engine will take a submission for its adapter, however long it waits; None where one may."""
        newest = self.of(submission.model).get(submission.adapter)
        if not submission.adapter or newest is None:
            return None
        if submission.adapter_version != newest.version:
            return self._missing(
                submission,
                "its weights were replaced or removed while this was answered, no engine has the former "
                "ones, and an answer goes on with no others; send the request again for the new ones",
            )
        found = [self._refusals.get((each.target, newest.name)) for each in self._engines(submission.model)]
        told = [each[1].message for each in found if each is not None and each[0] == newest.order]
        if not told or len(told) < len(found):
            return None
        return self._missing(submission, f"no engine can read it any more ({told[0]}); have it loaded again")

    @staticmethod
    def _missing(submission: Submission, why: str) -> MillraceError:
        message = f"adapter {submission.adapter!r}: {why}"
        return MillraceError(Reason.MODEL_NOT_FOUND, message, field="model")

    # --- operators ---

    async def add(self, model: str, name: str, path: str) -> None:
        """Lets a name stand for the adapter in a folder, at all engines or at none; returns when all say so.
        Raises INVALID_ARGUMENT with what one of them says that refuses.
        """
        engines = self._attached(model)
        async with _limited(name):
            checked = engine_pb2.CheckAdapterRequest(path=path)
            versions = {each.version for each in await _everywhere(engines, "CheckAdapter", checked)}
            if len(versions) > 1:
                raise invalid(
                    "lora_path", f"engines find different files in {path}; give a folder that they share"
                )
            await self._change(model, AdapterInfo(name, path, versions.pop()), engines)

    async def remove(self, model: str, name: str) -> None:
        """Lets a name stand for nothing, at all engines; returns when all say so. Raises MODEL_NOT_FOUND."""
        engines = self._attached(model)
        newest = self.of(model).get(name)
        if newest is None or not newest.version:
            served = (
                ", ".join(sorted(each.name for each in self.of(model).values() if each.version)) or "none"
            )
            raise MillraceError(
                Reason.MODEL_NOT_FOUND,
                f"lora_name: adapter {name[:80]!r} is not served; those that are: {served}",
                field="lora_name",
            )
        async with _limited(name):
            await self._change(model, AdapterInfo(name), engines)

    async def _change(self, model: str, new: AdapterInfo, engines: Sequence[Attachment]) -> None:
        newest = self.of(model).get(new.name)
        generation = max(time.time_ns(), 0 if newest is None else newest.generation + 1)
        new = msgspec.structs.replace(new, generation=generation)
        answers = await asyncio.gather(*(_put(each, new) for each in engines), return_exceptions=True)
        for engine, answer in zip(engines, answers, strict=True):
            # One that is lost meanwhile is given it when it comes back.
            if isinstance(answer, BaseException) and engine.info is not None:
                raise answer
        while not all(_has(each, new) for each in engines if each.info is not None):
            self._changed.clear()
            await self._changed.wait()

    def _attached(self, model: str) -> Sequence[Attachment]:
        engines = self._engines(model)
        if not engines:
            raise MillraceError(
                Reason.ENGINE_UNAVAILABLE, "no engine of this model is attached; try again", retry_after_s=1.0
            )
        return engines

    # --- engines ---

    def note(self, attachment: Attachment) -> None:
        """An engine is attached, gone, or says what names stand for at it."""
        self._changed.set()
        if attachment.info is None:
            self._refusals = {
                key: each for key, each in self._refusals.items() if key[0] != attachment.target
            }
            return
        newest = self._newest.setdefault(attachment.info.model_key, {})
        for name, each in attachment.adapters.items():
            if name not in newest or each.order > newest[name].order:
                newest[name] = each
        for engine in self._engines(attachment.info.model_key):
            if engine.target not in self._giving and any(self._lacking(engine)):
                giving = asyncio.create_task(self._give(engine), name=f"adapters of {engine.target}")
                self._giving[engine.target] = giving

    def _lacking(self, engine: Attachment) -> Iterator[AdapterInfo]:
        """What an engine should be given. What others have by their configuration alone is not for it."""
        known = {} if engine.info is None else self.of(engine.info.model_key)
        for name, each in known.items():
            refused = self._refusals.get((engine.target, name))
            if each.generation and not _has(engine, each) and (refused is None or refused[0] != each.order):
                yield each

    async def _give(self, engine: Attachment) -> None:
        """Gives an engine what it lacks, until it lacks nothing or is gone."""
        pause_s = _FIRST_PAUSE_S
        try:
            while any(self._lacking(engine)):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
                for each in list(self._lacking(engine)):
                    await self._give_one(engine, each)
        finally:
            self._giving.pop(engine.target, None)

    async def _give_one(self, engine: Attachment, adapter: AdapterInfo) -> None:
        try:
            await _put(engine, adapter)
        except MillraceError as error:
            if error.retry_after_s is None and engine.info is not None:
                self._refusals[engine.target, adapter.name] = adapter.order, error
            _log.error("engine %s was not given adapter %s: %s", engine.target, adapter.name, error.message)

    def stop(self) -> None:
        """Gives nothing to anybody any more."""
        for giving in self._giving.values():
            giving.cancel()


def _has(engine: Attachment, adapter: AdapterInfo) -> bool:
    """Whether a name stands at an engine for this, or for something newer."""
    found = engine.adapters.get(adapter.name)
    return found is not None and found.order >= adapter.order


@asynccontextmanager
async def _limited(name: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(_LIMIT_S):
            yield
    except TimeoutError as error:
        problem = f"adapter {name!r}: not all engines have answered within {_LIMIT_S:g} s; ask again"
        raise MillraceError(Reason.ENGINE_UNAVAILABLE, problem, retry_after_s=1.0) from error


async def _put(engine: Attachment, adapter: AdapterInfo) -> None:
    fields: dict[str, Any] = {"name": adapter.name, "generation": adapter.generation}
    if adapter.version:
        fields |= {"path": adapter.path, "version": adapter.version}
        await _ask(engine, "AddAdapter", engine_pb2.AddAdapterRequest(**fields))
    else:
        await _ask(engine, "RemoveAdapter", engine_pb2.RemoveAdapterRequest(**fields))


async def _everywhere(engines: Sequence[Attachment], method: str, request: Any) -> list[Any]:
    """What all engines answer; raises the first failure when all have answered."""
    answers = await asyncio.gather(*(_ask(each, method, request) for each in engines), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


async def _ask(engine: Attachment, method: str, request: Any) -> Any:
    """An engine's answer. Raises its refusal, which names the fields of the HTTP endpoints."""
    async with connect(engine.target) as channel:
        call: Callable[..., Awaitable[Any]] = getattr(engine_pb2_grpc.EngineServiceStub(channel), method)
        try:
            return await call(request, timeout=_LIMIT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                problem = f"engine {engine.target} serves no adapters"
                raise invalid("lora_name", problem, Reason.UNSUPPORTED_FIELD) from error
            refused = from_rpc_error(error, unavailable=Reason.ENGINE_UNAVAILABLE)
            if refused.field in ("name", "path"):
                problem = refused.message.removeprefix(f"{refused.field}: ")
                raise invalid(f"lora_{refused.field}", problem, refused.reason) from error
            raise refused from error
