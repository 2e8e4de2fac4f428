"""What becomes of texts for threads where their tenant has had its time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import closing

import pytest_asyncio
from millrace.common.v1 import chat_pb2, context_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

from observability.emit import names
from observability.emit.config import ObservabilityConfig
from observability.emit.metrics import Metrics
from observability.emit.tracing import Telemetry
from runtime.config import ModelConfig
from runtime.context import sign
from runtime.deferred import Deferred
from runtime.models import Models
from tokenizer_svc.config import BUNDLED_CHECKPOINT, CompileConfig, PromptLimitsConfig
from tokenizer_svc.grammar.request import WorkerSetup
from tokenizer_svc.messages.wire import LargeAnswer, vocabulary_response
from tokenizer_svc.service.compiler import GrammarCompiler
from tokenizer_svc.service.prepare import Preparer
from tokenizer_svc.service.servicer import TokenizerServicer
from tokenizer_svc.service.shelf import Served, Shelf
from tokenizer_svc.service.threads import INLINE_CHARACTERS, TextThreads
from tokenizer_svc.text.checkpoint import load_checkpoint
from tokenizer_svc.workers.pool import WorkerPool

SECRET = b"secret of the tests, long enough"


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    setup = WorkerSetup(
        checkpoint=load_checkpoint(BUNDLED_CHECKPOINT),
        limits=PromptLimitsConfig(),
        memory_limit_bytes=512 << 20,
    )
    pool = WorkerPool(CompileConfig(workers=2), setup)
    await pool.start()
    yield pool
    await pool.close()


class Context:
    """What handlers ask of a call."""

    def time_remaining(self) -> float | None:
        return None


async def test_texts_of_a_tenant_in_debt_are_prepared_by_workers_of_the_lowest_priority(
    pool: WorkerPool,
) -> None:
    checkpoint = load_checkpoint(BUNDLED_CHECKPOINT)
    telemetry = Telemetry("tokenizer", ObservabilityConfig(), None)
    metrics = Metrics()
    preparer = Preparer(
        checkpoint,
        GrammarCompiler(pool, fingerprint="x", cache_bytes=1 << 20),
        telemetry,
        metrics,
        limits=PromptLimitsConfig(),
        turn_cache_tokens=1 << 20,
    )
    # Nobody has asked yet.
    for result in ("hit", "miss"):
        assert metrics.registry.get_sample_value(names.GRAMMAR_LOOKUPS.name, {"result": result}) == 0
    model = ModelConfig()

    async def load(model: ModelConfig) -> Served:
        return Served(model, preparer, vocabulary_response(checkpoint), pool)

    shelf = Shelf(load)
    await shelf.start(Models(models={model.served_name: model}))
    servicer = TokenizerServicer(
        shelf,
        telemetry,
        Deferred(),
        secret=SECRET,
        max_context_age_s=60.0,
        allow_unsigned=False,
        prepare_limit_s=300.0,
        beat_s=300.0,
    )

    async def ids(tenant: str, text: str) -> list[int]:
        request = tokenizer_pb2.PrepareRequest(
            conversation=chat_pb2.Conversation(
                messages=[chat_pb2.Message(role=chat_pb2.ROLE_USER, content=text)]
            ),
            context=sign(
                context_pb2.RequestContext(tenant=tenant, issued_unix_ms=round(time.time() * 1000)), SECRET
            ),
        )
        answer = await servicer.Prepare(request, Context())
        if isinstance(answer, LargeAnswer):
            answer = tokenizer_pb2.PrepareResponse.FromString(b"".join(answer.parts))
        return list(answer.token_ids)

    long, short = "the rain in spain " * (INLINE_CHARACTERS // 10), "the rain"
    with closing(preparer):
        expected = await ids("debtor", long)
        assert not pool._idle_slow
        pool._accounts.charge("debtor", 5.0)
        assert await ids("debtor", short) == await ids("other", short)
        assert not pool._idle_slow
        assert await ids("debtor", long) == expected
        assert len(pool._idle_slow) == 1
        # Others' stay in threads.
        workers = set(pool._workers)
        assert await ids("other", long) == expected
        assert pool._workers == workers


async def test_what_a_client_has_left_goes_on_in_its_tenants_turn_alone() -> None:
    begun, may_end = threading.Event(), threading.Event()
    ran: list[str] = []

    def slow() -> None:
        begun.set()
        assert may_end.wait(60)
        ran.append("left")

    with closing(TextThreads()) as threads:

        def asked(work: str, tenant: str) -> asyncio.Task[None]:
            return asyncio.create_task(threads.run(INLINE_CHARACTERS, lambda: ran.append(work), tenant))

        left = asyncio.create_task(threads.run(INLINE_CHARACTERS, slow, "a"))
        await asyncio.to_thread(begun.wait, 60)
        # Of one tenant: one that begins after it, and one that nobody waits for before it has begun.
        waiting, never = asked("next", "a"), asked("never", "a")
        await asked("first", "b")
        for each in (left, never):
            each.cancel()
        await asyncio.gather(left, never, return_exceptions=True)
        await asked("second", "b")
        assert ran == ["first", "second"]
        may_end.set()
        await waiting
        assert ran == ["first", "second", "left", "next"]
        assert not threads._mutexes
