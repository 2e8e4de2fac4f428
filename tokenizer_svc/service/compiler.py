"""Compiled grammars by content and tenant: the same request compiles once.

Shared between tenants, they would compile once for all; but how long a request takes then tells whether
another tenant has used the same schema.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from typing import TypeAlias

import msgspec

from contract.errors import MillraceError
from contract.grammar import GrammarSpec, Verdict
from tokenizer_svc.grammar.request import (
    BACKEND,
    Built,
    EncodedGrammar,
    GrammarRequest,
    ValidationRequest,
    WorkerReply,
    WorkRefusal,
)
from tokenizer_svc.types import Compiled
from tokenizer_svc.workers.pool import WorkerPool

# Refusals are remembered so that a hostile grammar sent again costs nothing; those for lack of time only for
# a while, because the machine may have been busy.
_REFUSAL_S = 300.0
_OVERRUN_S = 30.0
_MAX_REFUSALS = 4096
# Bookkeeping of an entry beside its payload, in bytes.
_ENTRY_BYTES = 512

# A request's content address, and the tenant that its grammar belongs to: "" is everybody.
_Asked: TypeAlias = tuple[bytes, str]


class _UnderWay(msgspec.Struct, eq=False):
    """A compilation that is asked for: in whose turn it is, and how many wait for it."""

    request: EncodedGrammar
    tenant: str
    task: asyncio.Task[WorkerReply]
    num_callers: int = 0


class GrammarCompiler:
    """Compiles through the pool, once per content. Use from one event loop."""

    def __init__(self, pool: WorkerPool, *, fingerprint: str, cache_bytes: int, shared: bool = False) -> None:
        """`shared` compiles once for all tenants."""
        self.pool = pool
        self._fingerprint = fingerprint
        self._capacity = cache_bytes
        self._shared = shared
        self._size = 0
        # By content, and by tenant unless they are shared.
        self._built: OrderedDict[_Asked, Compiled] = OrderedDict()
        # Where they are shared also by tenant, if one in debt asked: its workers may be late for want of a
        # processor, which is nobody else's matter.
        self._refused: OrderedDict[_Asked, tuple[float, WorkRefusal]] = OrderedDict()
        self._in_flight: dict[_Asked, _UnderWay] = {}

    async def compile(self, request: EncodedGrammar, *, tenant: str) -> tuple[Compiled, bool]:
        """The grammar, and whether it was there already. Where it takes too much time or memory, tools that
        are not strict take any object. Raises GRAMMAR_REFUSED with the reason.
        """
        try:
            return await self._found(request, tenant)
        except MillraceError as error:
            if "overrun" not in error.metadata:
                raise
            whole = msgspec.msgpack.decode(request.payload, type=GrammarRequest)
            if (less := whole.without_schemas(error.message)) is None:
                raise
        return await self._found(less.encoded(), tenant)

    async def _found(self, request: EncodedGrammar, tenant: str) -> tuple[Compiled, bool]:
        key = (request.key, "" if self._shared else tenant)
        found = self._built.get(key)
        if found is not None:
            self._built.move_to_end(key)
            return found, True
        asked = (request.key, tenant) if self.pool.in_debt(tenant) else key
        for each in dict.fromkeys((asked, key)):
            self._raise_if_refused(each)
        work = self._joined(key, asked, tenant) or self._begun(request, key, asked, tenant)
        work.num_callers += 1
        try:
            reply = await asyncio.shield(work.task)
        finally:
            work.num_callers -= 1
            self._give_up(work.tenant)
        if reply.built is None:
            assert reply.refused is not None
            raise refusal(reply.refused)
        return self._built.get(key) or self._compiled(reply.built, key[1]), False

    def _joined(self, key: _Asked, asked: _Asked, tenant: str) -> _UnderWay | None:
        """The same work, under way: not behind what another tenant has queued before it."""
        for each in dict.fromkeys((key, asked)):
            work = self._in_flight.get(each)
            if work is not None and (work.tenant == tenant or not self.pool.num_queued(work.tenant)):
                return work
        return None

    def _begun(self, request: EncodedGrammar, key: _Asked, asked: _Asked, tenant: str) -> _UnderWay:
        task = asyncio.ensure_future(self.pool.run(request, tenant=tenant))
        work = self._in_flight[asked] = _UnderWay(request, tenant, task)
        task.add_done_callback(lambda done: self._finish(key, asked, done))
        # Once it has been queued: it may have to wait for what nobody else waits for.
        asyncio.get_running_loop().call_soon(self._give_up, tenant)
        return work

    def _give_up(self, tenant: str) -> None:
        """Ends the tenant's work that nobody waits for. What a worker has begun goes on, since its result is
        kept, unless other work of the tenant waits for a worker.
        """
        left = [
            (asked, work)
            for asked, work in self._in_flight.items()
            if work.tenant == tenant and not work.num_callers and not work.task.done()
        ]
        queued = [each for each in left if self.pool.is_waiting(each[1].request, tenant=tenant)]
        for asked, work in left if self.pool.num_queued(tenant) > len(queued) else queued:
            # A caller that comes now must not join what ends.
            del self._in_flight[asked]
            work.task.cancel()

    async def validate(self, schema_json: str, texts: tuple[str, ...], *, tenant: str) -> tuple[Verdict, ...]:
        """One verdict per text. Raises GRAMMAR_REFUSED when the schema cannot judge, or takes too long."""
        request = ValidationRequest(schema_json=schema_json, texts=texts)
        reply = await self.pool.run(request, tenant=tenant)
        if reply.verdicts is None:
            assert reply.refused is not None
            raise refusal(reply.refused)
        return reply.verdicts

    def _finish(self, key: _Asked, asked: _Asked, task: asyncio.Task[WorkerReply]) -> None:
        work = self._in_flight.get(asked)
        if work is not None and work.task is task:
            del self._in_flight[asked]
        if task.cancelled() or task.exception() is not None:
            return
        reply = task.result()
        if reply.refused is not None:
            keep_s = _OVERRUN_S if reply.refused.overrun else _REFUSAL_S
            self._refused[asked] = (time.monotonic() + keep_s, reply.refused)
            while len(self._refused) > _MAX_REFUSALS:
                self._refused.popitem(last=False)
        elif reply.built is not None:
            compiled = self._compiled(reply.built, key[1])
            replaced = self._built.pop(key, None)
            if replaced is not None:
                self._size -= len(replaced.artifact.payload) + _ENTRY_BYTES
            self._built[key] = compiled
            self._size += len(compiled.artifact.payload) + _ENTRY_BYTES
            while self._size > self._capacity and len(self._built) > 1:
                _, dropped = self._built.popitem(last=False)
                self._size -= len(dropped.artifact.payload) + _ENTRY_BYTES

    def _compiled(self, built: Built, owner: str) -> Compiled:
        # Engines keep grammars by digest: not each other's either.
        digest = hashlib.sha256(built.payload + f"{self._fingerprint}\0{owner}".encode()).hexdigest()
        artifact = GrammarSpec(digest=digest, payload=built.payload, backend=BACKEND)
        return Compiled(artifact=artifact, enforcement=built.enforcement)

    def _raise_if_refused(self, asked: _Asked) -> None:
        entry = self._refused.get(asked)
        if entry is None:
            return
        until, refused = entry
        if until > time.monotonic():
            raise refusal(refused)
        del self._refused[asked]


def refusal(refused: WorkRefusal) -> MillraceError:
    """The error that the sender gets."""
    metadata = {**refused.metadata, **({"overrun": refused.overrun} if refused.overrun else {})}
    return MillraceError(refused.reason, refused.message, field=refused.field, metadata=metadata)
