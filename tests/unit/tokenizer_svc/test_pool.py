"""Budgets and fairness of the worker processes, with real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from millrace.tokenizer.v1 import tokenizer_pb2

from contract.chat import JsonSchemaFormat, ToolChoiceMode
from contract.errors import MillraceError, Reason
from tests.unit.tokenizer_svc.schemas import slow_schema
from tokenizer_svc.config import BUNDLED_CHECKPOINT, CompileConfig, PromptLimitsConfig
from tokenizer_svc.grammar.request import (
    EncodedGrammar,
    GrammarRequest,
    PromptRequest,
    ToolRules,
    ToolSpec,
    WorkerReply,
    WorkerSetup,
)
from tokenizer_svc.service.compiler import GrammarCompiler
from tokenizer_svc.text.checkpoint import load_checkpoint
from tokenizer_svc.workers.fork_server import ForkServer, Worker
from tokenizer_svc.workers.pool import WorkerPool

SETUP = WorkerSetup(
    checkpoint=load_checkpoint(BUNDLED_CHECKPOINT),
    limits=PromptLimitsConfig(max_schema_depth=64, max_artifact_bytes=1 << 20),
    # Far more than a hostile grammar can fill before its time is up, however fast the machine.
    memory_limit_bytes=8 << 30,
)

# Longest time that anything which must happen may take; it does not slow a test that passes.
LIMIT_S = 120.0

SMALL_SETUP = msgspec.structs.replace(SETUP, memory_limit_bytes=64 << 20)


def request(schema: object) -> EncodedGrammar:
    return GrammarRequest(response_format=JsonSchemaFormat(json.dumps(schema), strict=False)).encoded()


def slow(number: int) -> EncodedGrammar:
    return request(json.loads(slow_schema(number)))


QUICK = request({"type": "object", "properties": {"a": {"type": "integer"}}})


@asynccontextmanager
async def started(
    setup: WorkerSetup = SETUP, *, silence_limit_s: float | None = None, **config: Any
) -> AsyncIterator[WorkerPool]:
    silence = {} if silence_limit_s is None else {"silence_limit_s": silence_limit_s}
    pool = WorkerPool(CompileConfig(**config), setup, **silence)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


async def until(condition: Callable[[], object]) -> None:
    """Waits for what must come to hold; fails by its time limit when it never does."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    async with started(workers=2, time_limit_s=0.5, max_queued_per_tenant=3, max_queued=5) as pool:
        yield pool


@pytest_asyncio.fixture
async def patient() -> AsyncIterator[WorkerPool]:
    """As `pool`, but work may take longer than any test: nothing ends by itself, however slow the machine."""
    async with started(workers=2, time_limit_s=3600.0, max_queued_per_tenant=3, max_queued=5) as pool:
        yield pool


async def test_a_grammar_is_built(pool: WorkerPool) -> None:
    reply = await pool.run(QUICK, tenant="a")
    assert reply.built is not None
    assert json.loads(reply.built.payload)["grammars"][0]["json_schema"]["type"] == "object"


async def test_overrunning_time_is_refused_and_the_worker_replaced(pool: WorkerPool) -> None:
    reply = await pool.run(slow(1), tenant="a")
    assert reply.refused is not None
    assert reply.refused.overrun == "time"
    assert "0.5 s" in reply.refused.message
    assert pool.num_overruns == {"time": 1, "memory": 0}
    replies = await asyncio.gather(*(pool.run(QUICK, tenant=name) for name in "bcd"))
    assert all(reply.built is not None for reply in replies)


async def test_overrunning_memory_is_refused() -> None:
    async with started(SMALL_SETUP, workers=1, time_limit_s=60.0) as pool:
        reply = await pool.run(slow(1), tenant="a")
        assert reply.refused is not None
        assert reply.refused.overrun == "memory"
        assert pool.num_overruns == {"time": 0, "memory": 1}
        assert (await pool.run(QUICK, tenant="a")).built is not None


async def test_a_text_that_needs_too_much_memory_is_told_what_fits() -> None:
    async with started(SMALL_SETUP, workers=1, memory_limit_bytes=64 << 20) as pool:
        wire = tokenizer_pb2.PrepareRequest(text="word " * 400_000).SerializeToString()
        reply = await pool.run(PromptRequest().encoded(wire, "prompt"), tenant="a")
        assert reply.refused is not None
        assert (reply.refused.overrun, reply.refused.field) == ("memory", "prompt")
        assert "limit of 67108864 bytes" in reply.refused.message
        fits = int(reply.refused.message.partition("One text of up to about ")[2].split()[0])
        wire = tokenizer_pb2.PrepareRequest(text="word " * (fits // 10)).SerializeToString()
        reply = await pool.run(PromptRequest().encoded(wire, "prompt"), tenant="b")
        assert reply.prompted is not None


async def test_other_tenants_are_served_while_one_is_slow(patient: WorkerPool) -> None:
    hostile = [asyncio.ensure_future(patient.run(slow(number), tenant="hostile")) for number in range(3)]
    await asyncio.sleep(0)
    for _ in range(20):
        reply = await patient.run(QUICK, tenant="good")
        assert reply.built is not None
    for task in hostile:
        assert not task.done()
        task.cancel()


async def test_queues_are_bounded_for_each_tenant(patient: WorkerPool) -> None:
    tasks = [asyncio.ensure_future(patient.run(slow(number), tenant="hostile")) for number in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(MillraceError, match="retry later") as caught:
        await patient.run(QUICK, tenant="hostile")
    assert caught.value.reason is Reason.QUEUE_LIMIT_EXCEEDED
    assert (await patient.run(QUICK, tenant="good")).built is not None
    for task in tasks:
        task.cancel()


async def test_closing_refuses_what_waits(pool: WorkerPool) -> None:
    tasks = [asyncio.ensure_future(pool.run(slow(number), tenant="a")) for number in range(3)]
    await asyncio.sleep(0)
    await pool.close()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, MillraceError) and each.reason is Reason.DRAINING for each in outcomes)


async def test_the_same_grammar_of_a_tenant_compiles_once(pool: WorkerPool) -> None:
    compiler = GrammarCompiler(pool, fingerprint="f", cache_bytes=1 << 20)
    first, second = await asyncio.gather(*(compiler.compile(QUICK, tenant="a") for _ in range(2)))
    third = await compiler.compile(QUICK, tenant="a")
    assert first[0].artifact == second[0].artifact == third[0].artifact
    assert (first[1], third[1]) == (False, True)
    other = GrammarCompiler(pool, fingerprint="g", cache_bytes=1 << 20)
    assert (await other.compile(QUICK, tenant="a"))[0].artifact.digest != first[0].artifact.digest


@pytest.mark.parametrize("shared", [False, True])
async def test_a_grammar_is_compiled_for_each_tenant_unless_they_are_shared(
    pool: WorkerPool, shared: bool
) -> None:
    compiler = GrammarCompiler(pool, fingerprint="f", cache_bytes=1 << 20, shared=shared)
    first, _ = await compiler.compile(QUICK, tenant="a")
    second, cached = await compiler.compile(QUICK, tenant="b")
    assert cached is shared
    assert (first.artifact.payload, first.enforcement) == (second.artifact.payload, second.enforcement)
    # Engines find what they have prepared by it.
    assert (first.artifact.digest == second.artifact.digest) is shared


async def test_a_refusal_is_remembered(pool: WorkerPool) -> None:
    compiler = GrammarCompiler(pool, fingerprint="f", cache_bytes=1 << 20)
    for _ in range(3):
        with pytest.raises(MillraceError, match=r"0\.5 s") as caught:
            await compiler.compile(slow(2), tenant="a")
        assert caught.value.reason is Reason.GRAMMAR_REFUSED
        assert caught.value.metadata == {"overrun": "time"}
    assert pool.num_overruns["time"] == 1


async def test_tools_that_take_too_long_take_any_object_unless_they_are_strict(pool: WorkerPool) -> None:
    compiler = GrammarCompiler(pool, fingerprint="f", cache_bytes=1 << 20)
    quick = ToolSpec(name="quick", parameters_json='{"type": "object"}', strict=True)
    slow_tool = ToolSpec(name="slow", parameters_json=slow_schema(5))

    def asked(*tools: ToolSpec) -> EncodedGrammar:
        rules = ToolRules(tools=tools, mode=ToolChoiceMode.AUTO, parallel=True, format="hermes", first=3)
        return GrammarRequest(tools=rules).encoded()

    for is_cached in (False, True):
        compiled, cached = await compiler.compile(asked(quick, slow_tool), tenant="a")
        assert cached is is_cached
        assert compiled.enforcement is not None
        (told,) = compiled.enforcement.unenforced
        assert (told.keyword, told.path) == ("parameters", "/tools/4/parameters")
        assert "tool 'slow' takes any JSON object" in told.note
        assert "limit of 0.5 s" in told.note
    assert pool.num_overruns["time"] == 1
    # The same without what strict mode refuses itself.
    written = slow_schema(5).replace('"minProperties": 5', '"title": "5"')
    strict = ToolSpec(name="slow", parameters_json=written, strict=True)
    with pytest.raises(MillraceError, match=r"0\.5 s") as caught:
        await compiler.compile(asked(quick, strict), tenant="a")
    assert caught.value.reason is Reason.GRAMMAR_REFUSED


async def test_the_cache_forgets_the_least_recently_used(pool: WorkerPool) -> None:
    compiler = GrammarCompiler(pool, fingerprint="f", cache_bytes=2_000)
    requests = [request({"const": f"{number}" * 100}) for number in range(4)]
    for each in requests:
        await compiler.compile(each, tenant="a")
    assert (await compiler.compile(requests[-1], tenant="a"))[1]
    assert not (await compiler.compile(requests[0], tenant="a"))[1]


async def test_what_takes_long_gives_way_to_the_rest(patient: WorkerPool) -> None:
    running = asyncio.ensure_future(patient.run(slow(3), tenant="a"))
    await asyncio.sleep(0)
    (worker,) = patient._workers - set(patient._idle)
    while not worker.yielding:
        await asyncio.sleep(0.01)
    assert os.getpriority(os.PRIO_PROCESS, worker.pid) > os.getpriority(os.PRIO_PROCESS, 0)
    running.cancel()
    await asked(patient)
    # Its priority cannot be taken back, so it does not serve others.
    assert (await patient.run(QUICK, tenant="b")).built is not None
    assert not any(each.yielding for each in patient._idle)


async def test_workers_come_back_when_the_process_they_are_copies_of_is_gone(pool: WorkerPool) -> None:
    process = pool._fork_server._process
    assert process is not None
    process.kill()
    assert (await pool.run(slow(4), tenant="a")).refused is not None
    replies = await asyncio.gather(*(pool.run(QUICK, tenant=name) for name in "bcd"))
    assert all(reply.built is not None for reply in replies)


async def test_a_tenant_in_debt_is_served_by_workers_kept_for_that(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await pool.run(slow(5), tenant="debtor")).refused is not None
    fast = set(pool._idle)
    # The lowest priority has next to nothing of a machine that is busy with other tests.
    monkeypatch.setattr("tokenizer_svc.workers.pool._MAX_STRETCH", 60.0)
    assert (await pool.run(QUICK, tenant="debtor")).built is not None
    (slowest,) = pool._idle_slow
    assert os.sched_getscheduler(slowest.pid) == os.SCHED_IDLE
    assert (await pool.run(request({"const": 1}), tenant="debtor")).built is not None
    assert pool._idle_slow == [slowest]
    monkeypatch.undo()
    # Long work does not raise it either.
    running = asyncio.ensure_future(pool.run(slow(10), tenant="debtor"))
    await asked(pool, "debtor")
    assert os.sched_getscheduler(slowest.pid) == os.SCHED_IDLE
    assert (await running).refused is not None
    # Others neither wait for it nor get it.
    assert fast <= set(pool._idle)
    assert (await pool.run(QUICK, tenant="good")).built is not None
    assert not any(each.yielding for each in pool._idle)


async def test_work_that_nobody_waits_for_is_given_up(patient: WorkerPool) -> None:
    first = asyncio.ensure_future(patient.run(slow(6), tenant="a"))
    waiting = asyncio.ensure_future(patient.run(slow(7), tenant="a"))
    await asked(patient, "a")
    assert patient.num_waiting == 1
    waiting.cancel()
    first.cancel()
    await asked(patient)
    assert patient.num_overruns == {"time": 0, "memory": 0}
    assert (await patient.run(QUICK, tenant="b")).built is not None
    assert patient.num_waiting == 0


async def asked(pool: WorkerPool, *tenants: str) -> None:
    """Waits until workers serve these tenants."""
    await until(lambda: sorted(job.tenant for job in pool._tasks.values()) == list(tenants))


async def test_others_do_not_wait_for_the_same_grammar_of_a_tenant_in_debt(pool: WorkerPool) -> None:
    compiler = GrammarCompiler(pool, fingerprint="f", cache_bytes=1 << 20, shared=True)
    pool._accounts.charge("debtor", 60.0)
    theirs = asyncio.ensure_future(compiler.compile(slow(8), tenant="debtor"))
    await asked(pool, "debtor")
    ours = asyncio.ensure_future(compiler.compile(slow(8), tenant="good"))
    await asked(pool, "debtor", "good")
    for task in (theirs, ours):
        with pytest.raises(MillraceError, match="takes longer"):
            await task
    # The refusal of a tenant in debt, for want of time, is not kept as the grammar's for others.
    pool._accounts.charge("debtor", 60.0)
    with pytest.raises(MillraceError, match="takes longer"):
        await compiler.compile(slow(9), tenant="debtor")
    again = asyncio.ensure_future(compiler.compile(slow(9), tenant="another"))
    await asked(pool, "another")
    with pytest.raises(MillraceError, match="takes longer"):
        await again


async def test_others_do_not_wait_behind_what_a_tenant_queued_before_the_same_grammar(
    patient: WorkerPool,
) -> None:
    compiler = GrammarCompiler(patient, fingerprint="f", cache_bytes=1 << 20, shared=True)
    slower = [asyncio.ensure_future(patient.run(slow(30 + each), tenant="flood")) for each in range(3)]
    theirs = asyncio.ensure_future(compiler.compile(QUICK, tenant="flood"))
    while patient.num_queued("flood") < 3:
        await asyncio.sleep(0)
    ours, cached = await compiler.compile(QUICK, tenant="good")
    assert not cached
    assert patient.num_queued("flood"), "theirs still waits"
    for each in slower:
        each.cancel()
    assert (await theirs)[0].artifact == ours.artifact


async def test_a_tenant_has_half_of_the_machine_at_ordinary_priority() -> None:
    async with started(workers=6, time_limit_s=0.5) as pool:
        pool._max_fresh = 2
        running = [asyncio.ensure_future(pool.run(slow(20 + each), tenant="a")) for each in range(4)]
        await asyncio.sleep(0)
        # A tenant alone could have all workers; those that are late make room for its next.
        assert len(pool._tasks) == 2
        await asked(pool, "a", "a", "a")
        assert all(reply.refused is not None for reply in await asyncio.gather(*running))
        await asked(pool)
        assert not pool._fresh


def stat(worker: Worker) -> list[str]:
    """Of the process, as the kernel says it, from its state on."""
    with open(f"/proc/{worker.pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()


def state(worker: Worker) -> str:
    """R, S, T (stopped), ..."""
    return stat(worker)[0]


async def test_of_a_tenants_long_work_one_part_computes_and_quick_work_passes_it() -> None:
    async with started(workers=4, time_limit_s=1.0) as pool:
        pool._max_fresh = pool._max_long = 1
        slow_ones = [asyncio.ensure_future(pool.run(slow(30 + each), tenant="a")) for each in range(2)]
        await until(lambda: len(pool._long.get("a", ())) == 2)
        first, second = (job.worker for job in pool._long["a"])
        assert first is not None
        assert second is not None
        await until(lambda: state(second) == "T")
        assert state(first) != "T"
        assert (await pool.run(QUICK, tenant="a")).built is not None
        assert not any(task.done() for task in slow_ones)
        # The second has all of its time once the first is done; to be stopped costs it none.
        await asyncio.wait(slow_ones, return_when=asyncio.FIRST_COMPLETED)
        assert [task.done() for task in slow_ones] == [True, False]
        used_s = second.processor_s()
        await until(lambda: second.processor_s() > used_s)
        assert all(reply.refused is not None for reply in await asyncio.gather(*slow_ones))
        await asked(pool)
        assert not pool._long


async def test_a_worker_that_is_stopped_with_its_answer_on_the_way_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop, stopped = Worker.stop, []

    def stop_once_it_has_answered(worker: Worker) -> None:
        # Meanwhile nobody reads the answer.
        while state(worker) != "S":
            time.sleep(0.001)
        stop(worker)
        stopped.append(worker)

    monkeypatch.setattr(Worker, "stop", stop_once_it_has_answered)
    async with started(workers=2, time_limit_s=30.0) as pool:
        # Other long work of the tenant's came before it.
        pool._max_long = 0
        pool._accounts.charge("a", 0.5)
        inner = {"type": "object", "properties": {f"b{each}": {"type": "integer"} for each in range(20)}}
        # Not so long that it would be refused for its own time: a full machine doubles what is counted of it.
        long = {"type": "object", "properties": {f"a{each}": inner for each in range(60)}}
        assert (await pool.run(request(long), tenant="a")).built is not None
        await asked(pool)
        assert pool._idle_slow == stopped
        await until(lambda: state(stopped[0]) != "T")


async def test_waking_a_worker_interrupts_nobody(pool: WorkerPool) -> None:
    assert (await pool.run(QUICK, tenant="a")).built is not None
    assert {os.sched_getscheduler(each.pid) for each in pool._idle} == {os.SCHED_BATCH}


def page_faults(worker: Worker) -> int:
    return int(stat(worker)[7])


async def test_a_new_worker_has_touched_before_its_first_request_what_it_writes_to() -> None:
    fork_server = ForkServer(SETUP)
    touched = []
    for lowest in (False, True):
        worker = await fork_server.worker(lowest=lowest)
        before = page_faults(worker)
        await worker.run((QUICK.payload,))
        touched.append(page_faults(worker) - before)
        worker.kill()
    await fork_server.close()
    # Those of the lowest priority do not rehearse: it would take them long where all cores are busy.
    rehearsed, new = touched
    assert rehearsed < new / 2


async def test_new_workers_have_their_priority_from_the_start() -> None:
    fork_server = ForkServer(SETUP)
    for lowest, policy in ((False, os.SCHED_BATCH), (True, os.SCHED_IDLE)):
        worker = await fork_server.worker(lowest=lowest)
        assert os.sched_getscheduler(worker.pid) == policy
        # A rehearsal at a low priority leaves the process's own priority as it was.
        assert os.getpriority(os.PRIO_PROCESS, worker.pid) == os.getpriority(os.PRIO_PROCESS, 0)
        assert (worker.yielding, worker.lowest) == (lowest, lowest)
        worker.kill()
    await fork_server.close()


async def test_long_work_has_the_lowest_priority_before_its_tenant_is_in_debt(patient: WorkerPool) -> None:
    running = asyncio.ensure_future(patient.run(slow(20), tenant="a"))
    await asyncio.sleep(0)
    (worker,) = patient._workers - set(patient._idle)
    while os.sched_getscheduler(worker.pid) != os.SCHED_IDLE:
        assert not running.done()
        await asyncio.sleep(0.001)
    assert not patient.in_debt("a")
    running.cancel()


async def test_processor_time_is_that_of_the_worker(pool: WorkerPool) -> None:
    (worker, *_) = pool._idle
    before_s = worker.processor_s()
    reply = await worker.run((QUICK.payload,))
    told_s = msgspec.msgpack.decode(reply, type=WorkerReply).processor_s
    assert told_s <= worker.processor_s() - before_s
    pool._kill(worker)
    await until(lambda: not worker.processor_s())


# Computes far longer than it takes until the first signal, without coming back to the interpreter meanwhile.
COURTEOUS = """
import ctypes, hashlib, signal
from tokenizer_svc.workers.yielding import Yielding
with Yielding():
    assert signal.getitimer(signal.ITIMER_REAL)[1] > 0
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 200_000)
assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
libc = ctypes.CDLL(None)
libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
handler = libc.signal(signal.SIGALRM, None)
assert handler == ctypes.cast(libc.sched_yield, ctypes.c_void_p).value, handler
print("done")
"""


def test_long_work_offers_its_core_again_and_again() -> None:
    done = subprocess.run([sys.executable, "-c", COURTEOUS], check=False, capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr


async def test_what_came_before_the_workers_is_done() -> None:
    pool = WorkerPool(CompileConfig(workers=1), SETUP)
    early = asyncio.create_task(pool.run(QUICK, tenant="a"))
    await asyncio.sleep(0)
    assert pool.num_waiting == 1
    try:
        await pool.start()
        assert (await asyncio.wait_for(early, LIMIT_S)).built is not None
    finally:
        await pool.close()


async def test_a_worker_that_stands_still_is_replaced_and_its_work_done() -> None:
    async with started(workers=2, silence_limit_s=0.5) as pool:
        before = {worker.pid for worker in pool._workers}
        for pid in before:
            os.kill(pid, signal.SIGSTOP)
        reply = await asyncio.wait_for(pool.run(QUICK, tenant="a"), LIMIT_S)
        assert reply.built is not None
        assert len(before & {worker.pid for worker in pool._workers}) == 1


async def test_work_that_every_worker_hangs_on_is_given_up() -> None:
    stopped: set[int] = set()
    async with started(workers=1, silence_limit_s=0.5) as pool:
        asking = asyncio.create_task(pool.run(QUICK, tenant="a"))
        # Before the loop has had a turn to write to a new one.
        new = pool._new

        async def stop_it(*, lowest: bool = False) -> Worker:
            worker = await new(lowest=lowest)
            os.kill(worker.pid, signal.SIGSTOP)
            stopped.add(worker.pid)
            return worker

        pool._new = stop_it  # type: ignore[method-assign]
        for worker in pool._workers:
            os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(MillraceError) as given_up:
            await asyncio.wait_for(asking, LIMIT_S)
        assert given_up.value.reason is Reason.TOKENIZER_UNAVAILABLE
        assert stopped


async def test_what_nobody_waits_for_and_has_not_begun_is_not_begun(patient: WorkerPool) -> None:
    compiler = GrammarCompiler(patient, fingerprint="f", cache_bytes=1 << 20)
    begun = asyncio.ensure_future(compiler.compile(slow(40), tenant="a"))
    await asked(patient, "a")
    left = [asyncio.ensure_future(compiler.compile(slow(41 + each), tenant="a")) for each in range(3)]
    await until(lambda: patient.num_queued("a") == 3)
    for each in left:
        each.cancel()
    # Their room in the queue is free at once, and the first goes on alone.
    await until(lambda: not patient.num_queued("a"))
    assert patient.num_waiting == 0
    assert not begun.done()
    await asked(patient, "a")
    begun.cancel()


async def test_work_that_was_left_makes_way_for_what_its_tenant_asks_for_next(patient: WorkerPool) -> None:
    compiler = GrammarCompiler(patient, fingerprint="f", cache_bytes=1 << 20)
    left = [asyncio.ensure_future(compiler.compile(slow(50 + each), tenant="a")) for each in range(4)]
    await until(lambda: patient.num_queued("a") == 3)
    for each in left:
        each.cancel()
    # Nothing but the next request ends what has begun: its time limit is an hour.
    assert (await asyncio.wait_for(compiler.compile(QUICK, tenant="a"), LIMIT_S))[0].artifact.payload
    await asked(patient)
    assert patient.num_overruns == {"time": 0, "memory": 0}
    assert (await compiler.compile(QUICK, tenant="b"))[0].artifact.payload


async def test_what_has_begun_and_was_left_is_kept_and_counts_for_its_tenant() -> None:
    async with started(workers=2, time_limit_s=60.0) as pool:
        compiler = GrammarCompiler(pool, fingerprint="f", cache_bytes=1 << 24)
        inner = {"type": "object", "properties": {f"b{each}": {"type": "integer"} for each in range(20)}}
        long = request({"type": "object", "properties": {f"a{each}": inner for each in range(60)}})
        leaving = asyncio.ensure_future(compiler.compile(long, tenant="a"))
        await asked(pool, "a")
        leaving.cancel()
        await asked(pool)
        assert pool._accounts.left_s("a") < pool._accounts.left_s("b")
        _, was_there = await compiler.compile(long, tenant="a")
        assert was_there


@pytest.mark.parametrize("leaves", [0, 1])
async def test_a_caller_that_leaves_takes_nothing_from_one_that_waits_for_the_same(
    patient: WorkerPool, leaves: int
) -> None:
    compiler = GrammarCompiler(patient, fingerprint="f", cache_bytes=1 << 20)
    before = asyncio.ensure_future(compiler.compile(slow(60), tenant="a"))
    await asked(patient, "a")
    both = [asyncio.ensure_future(compiler.compile(QUICK, tenant="a")) for _ in range(2)]
    await until(lambda: patient.num_queued("a") == 1)
    both[leaves].cancel()
    before.cancel()
    assert (await asyncio.wait_for(both[1 - leaves], LIMIT_S))[0].artifact.payload
    # Nor from one that comes right after the last has left.
    first = asyncio.ensure_future(compiler.compile(slow(61), tenant="a"))
    await asked(patient, "a")
    waiting = asyncio.ensure_future(compiler.compile(request({"const": 1}), tenant="a"))
    await until(lambda: patient.num_queued("a") == 1)
    waiting.cancel()
    next_one = asyncio.ensure_future(compiler.compile(request({"const": 1}), tenant="a"))
    await until(waiting.done)
    first.cancel()
    assert (await asyncio.wait_for(next_one, LIMIT_S))[0].artifact.payload
