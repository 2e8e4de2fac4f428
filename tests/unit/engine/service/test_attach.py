"""The engine over a real socket: streams, refusals, cancellation, drain and loss."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
import pytest_asyncio
from millrace.common.v1 import output_pb2
from millrace.engine.v1 import engine_pb2

from contract.errors import MillraceError, Reason
from contract.prefix import PrefixHasher, event_hash
from contract.proto.status import from_rpc_error
from tests.unit.engine.checked_runner import expected_token
from tests.unit.engine.service.engine_client import (
    MODEL_PATH,
    Engine,
    Gateway,
    signed,
    start_engine,
    tokens,
)

PROMPT = list(range(10, 50))
LOOP = pytest.mark.asyncio(loop_scope="module")
pytestmark = LOOP

FINISH = output_pb2.FinishReason


def expected(count: int, *, prompt: list[int] = PROMPT, seed: int = 1, choice: int = 0) -> list[int]:
    return [expected_token(tuple(prompt), seed, choice, position) for position in range(count)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    async with start_engine(SIMULATION__STEP_MS="1", MAX_STREAM_BACKLOG="200") as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(engine: Engine) -> AsyncIterator[Gateway]:
    attached = Gateway(engine)
    await attached.hello()
    yield attached
    attached.call.cancel()
    books = await engine.wait_until_idle()
    assert books.ok, books.violation
    assert books.num_unreferenced_blocks == books.num_total_blocks
    assert books.num_runner_states == 0


async def test_info_names_what_is_served(engine: Engine) -> None:
    info = await Gateway(engine, "whatever").hello()
    assert info.model == "simulated"
    assert info.vocabulary_fingerprint == "whatever"
    assert info.block_size == 16


async def test_tokens_and_timings_of_one_request(gateway: Gateway) -> None:
    await gateway.submit(7, PROMPT, max_tokens=5)
    outputs = (await gateway.until_ended(1))[7, 0]
    assert tokens(outputs) == expected(5)
    assert outputs[0].HasField("first_token")
    assert outputs[0].first_token.num_prefill_chunks == 1
    assert not any(output.HasField("first_token") for output in outputs[1:])
    assert outputs[-1].finish_reason == FINISH.FINISH_REASON_LENGTH
    assert outputs[-1].statistics.num_steps == 5


async def test_many_requests_at_once_share_each_steps_message(gateway: Gateway) -> None:
    for handle in range(20):
        await gateway.submit(handle, [*PROMPT, handle], max_tokens=30, seed=handle)
    outputs = await gateway.until_ended(20)
    for handle in range(20):
        assert tokens(outputs[handle, 0]) == expected(30, prompt=[*PROMPT, handle], seed=handle)


async def test_several_choices_and_log_probabilities(gateway: Gateway) -> None:
    await gateway.submit(1, PROMPT, n=3, logprobs=2, prompt_logprobs=0)
    outputs = await gateway.until_ended(3)
    for choice in range(3):
        assert tokens(outputs[1, choice]) == expected(4, choice=choice)
        assert all(len(each.logprobs) == len(each.token_ids) for each in outputs[1, choice])
    prompt_logprobs = [each for output in outputs[1, 0] for each in output.prompt_logprobs]
    assert [each.token_id for each in prompt_logprobs] == PROMPT[1:]


async def test_confidences_stand_for_the_alternatives_that_they_are_made_of(gateway: Gateway) -> None:
    await gateway.submit(1, PROMPT, logprobs=3)
    await gateway.submit(2, PROMPT, logprobs=1, confidence_top=3)
    await gateway.submit(3, PROMPT, confidence_top=3)
    outputs = await gateway.until_ended(3)
    alone, beside, only = ([each for each in outputs[handle, 0] if each.token_ids] for handle in (1, 2, 3))
    told = [each for output in alone for each in output.logprobs]
    expected = [-sum(top.logprob for top in each.top) / len(each.top) for each in told]
    for several in (beside, only):
        assert [each for output in several for each in output.confidences] == pytest.approx(expected)
    assert not any(output.confidences for output in alone)
    # Its client is told of one alternative, and the other's of not even the token itself.
    assert [len(each.top) for output in beside for each in output.logprobs] == [1] * len(told)
    assert not any(output.logprobs for output in only)


@pytest.mark.parametrize(("top", "options"), [(21, {}), (3, {"best_of": 2}), (3, {"beam_width": 2})])
async def test_confidences_that_cannot_be_told_are_refused(
    gateway: Gateway, top: int, options: dict[str, int]
) -> None:
    await gateway.submit(1, PROMPT, confidence_top=top, **options)
    refused = (await gateway.until_ended(1))[1, 0][0]
    assert (refused.error.field, refused.error.reason) == ("confidence_top", Reason.INVALID_ARGUMENT)


async def test_a_continued_request_yields_the_rest(gateway: Gateway) -> None:
    await gateway.submit(1, PROMPT, max_tokens=8, output=expected(3))
    outputs = await gateway.until_ended(1)
    assert tokens(outputs[1, 0]) == expected(8)[3:]


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        (engine_pb2.CANCEL_REASON_CLIENT, FINISH.FINISH_REASON_CANCELLED),
        (engine_pb2.CANCEL_REASON_STOP_STRING, FINISH.FINISH_REASON_STOP),
    ],
)
async def test_cancelling_mid_stream_frees_the_blocks(gateway: Gateway, reason: int, finish: int) -> None:
    await gateway.submit(1, PROMPT, max_tokens=10_000)
    await gateway.until_begun()
    await gateway.cancel(1, reason)
    outputs = await gateway.until_ended(1)
    assert outputs[1, 0][-1].finish_reason == finish


async def test_gateways_hear_what_was_computed_for_one_that_is_gone(engine: Engine, gateway: Gateway) -> None:
    leaving = Gateway(engine)
    await leaving.hello()
    await leaving.submit(1, PROMPT, max_tokens=8, output=expected(3), entry_id="ended")
    await leaving.until_ended(1)
    await leaving.submit(2, PROMPT, max_tokens=10_000, n=2, entry_id="open")
    num_read = 0
    while num_read < 10:
        num_read += sum(len(each.token_ids) for each in (await leaving.read()).outputs)
    leaving.call.cancel()
    await engine.wait_until_idle()
    later = Gateway(engine)
    await later.hello()
    for hearing in (gateway, later):
        heard: dict[str, int] = {}
        while len(heard) < 2:
            heard |= {each.entry_id: each.num_tokens for each in (await hearing.read()).unclaimed}
        assert heard["ended"] == 8, "with the tokens of the engine before"
        assert heard["open"] >= num_read > 0


async def test_a_gateway_that_disconnects_takes_its_requests_along(engine: Engine) -> None:
    leaving = Gateway(engine)
    await leaving.hello()
    for handle in range(5):
        await leaving.submit(handle, PROMPT, max_tokens=10_000)
    await leaving.read()
    leaving.call.cancel()
    books = await engine.wait_until_idle()
    assert books.num_unreferenced_blocks == books.num_total_blocks
    assert books.num_runner_states == 0


async def test_half_closing_ends_the_stream_and_its_requests(engine: Engine) -> None:
    leaving = Gateway(engine)
    await leaving.hello()
    await leaving.submit(1, PROMPT, max_tokens=10_000)
    await leaving.read()
    await leaving.call.done_writing()
    assert await leaving.status() == grpc.StatusCode.OK
    assert (await engine.wait_until_idle()).num_runner_states == 0


async def test_a_bad_signature_is_refused_and_the_stream_goes_on(gateway: Gateway) -> None:
    await gateway.submit(1, PROMPT, context=signed(secret=b"another secret entirely"))
    refused = (await gateway.until_ended(1))[1, 0][0]
    assert refused.error.reason == Reason.CONTEXT_SIGNATURE_INVALID
    await gateway.submit(2, PROMPT)
    assert tokens((await gateway.until_ended(1))[2, 0]) == expected(4)


@pytest.mark.parametrize(
    ("options", "field", "reason"),
    [
        ({"temperature": -1.0}, "sampling.temperature", Reason.INVALID_ARGUMENT),
        ({"top_p": 0.0}, "sampling.top_p", Reason.INVALID_ARGUMENT),
        ({"max_tokens": 0}, "sampling.max_tokens", Reason.INVALID_ARGUMENT),
        ({"min_tokens": 9}, "sampling.min_tokens", Reason.INVALID_ARGUMENT),
        ({"n": 1000}, "sampling.n", Reason.INVALID_ARGUMENT),
        ({"logprobs": 99}, "sampling.logprobs", Reason.INVALID_ARGUMENT),
        ({"logit_bias": {99_999_999: 1.0}}, "sampling.logit_bias", Reason.INVALID_ARGUMENT),
        ({"stop_token_ids": [99_999_999]}, "sampling.stop_token_ids", Reason.INVALID_ARGUMENT),
        ({"n": 2, "best_of": 1}, "sampling.best_of", Reason.INVALID_ARGUMENT),
    ],
)
async def test_bad_options_are_refused_by_name(
    gateway: Gateway, options: dict[str, object], field: str, reason: Reason
) -> None:
    await gateway.submit(3, PROMPT, **options)
    refused = (await gateway.until_ended(1))[3, 0][0]
    assert (refused.error.field, refused.error.reason) == (field, reason)
    assert field in refused.error.message


async def test_a_prompt_beyond_the_context_is_refused_with_the_limit(gateway: Gateway) -> None:
    await gateway.submit(1, [1] * 40_000)
    refused = (await gateway.until_ended(1))[1, 0][0]
    assert refused.error.reason == Reason.CONTEXT_LENGTH_EXCEEDED
    assert refused.error.metadata["limit_tokens"] == "32768"


async def test_token_ids_outside_the_vocabulary_are_refused(gateway: Gateway) -> None:
    await gateway.submit(1, [1, 2, 32_000])
    refused = (await gateway.until_ended(1))[1, 0][0]
    assert refused.error.field == "prompt_token_ids"


async def test_a_deadline_that_has_passed_ends_the_request(gateway: Gateway) -> None:
    past = time.time_ns() // 1_000_000 - 5
    await gateway.submit(1, PROMPT, context=signed(deadline_unix_ms=past))
    (output,) = (await gateway.until_ended(1))[1, 0]
    assert output.finish_reason == FINISH.FINISH_REASON_DEADLINE


async def test_streams_that_break_the_protocol_are_ended(engine: Engine) -> None:
    silent = engine.stub.Attach()
    await silent.write(engine_pb2.AttachRequest(cancel=engine_pb2.Cancel(handle=1)))
    assert await silent.code() == grpc.StatusCode.INVALID_ARGUMENT
    doubled = Gateway(engine)
    await doubled.hello()
    for _ in range(2):
        await doubled.submit(1, PROMPT, max_tokens=10_000)
    assert await doubled.status() == grpc.StatusCode.INVALID_ARGUMENT
    assert (await engine.wait_until_idle()).num_runner_states == 0


async def test_a_gateway_that_does_not_read_is_ended_and_others_are_not(
    engine: Engine, gateway: Gateway
) -> None:
    deaf = Gateway(engine)
    await deaf.hello()
    # Large messages fill the transport's window; the outbox then grows to its limit.
    for handle in range(40):
        await deaf.submit(handle, PROMPT, max_tokens=10_000, logprobs=20)
    books = await engine.wait_until_idle()
    assert books.num_unreferenced_blocks == books.num_total_blocks
    await gateway.submit(1, PROMPT)
    assert tokens((await gateway.until_ended(1))[1, 0]) == expected(4)


async def test_load_and_cache_events_reach_every_gateway_the_late_ones_too(
    engine: Engine, gateway: Gateway
) -> None:
    other = Gateway(engine)
    await other.hello()
    prompt = list(range(500, 548))
    chain = PrefixHasher(model=MODEL_PATH, adapter="", salt=b"", block_size=16)
    chain.extend(prompt, len(prompt))
    expected_hashes = {event_hash(each) for each in chain.hashes}
    await gateway.submit(1, prompt)
    late = Gateway(engine)
    for stream in (gateway, other, late):
        if stream is late:
            await late.hello()
        stored: set[int] = set()
        while not expected_hashes <= stored:
            message = await stream.read()
            assert message.load.num_total_blocks
            stored |= {each for event in message.kv_events for each in event.stored.block_hashes}
    for stream in (other, late):
        stream.call.cancel()


async def test_a_gateway_hears_of_a_part_of_what_is_cached_if_it_asks_for_that(
    engine: Engine, gateway: Gateway
) -> None:
    early, late = Gateway(engine), Gateway(engine)
    await early.hello(prefix_sample=4)
    prompt = list(range(1000, 1640))
    chain = PrefixHasher(model=MODEL_PATH, adapter="", salt=b"", block_size=16)
    chain.extend(prompt, len(prompt))
    known = {each for each in map(event_hash, chain.hashes) if each % 4 == 0}
    await gateway.submit(1, prompt)
    await gateway.until_ended(1)
    for stream in (early, late):
        if stream is late:
            await late.hello(prefix_sample=4)
        heard: set[int] = set()
        while not known <= heard:
            message = await stream.read()
            heard |= {each for event in message.kv_events for each in event.stored.block_hashes}
        assert all(each % 4 == 0 for each in heard)
        stream.call.cancel()


async def test_another_vocabulary_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    checkpoint = tmp_path_factory.mktemp("checkpoint")
    vocabulary = {f"word{number}": number for number in range(1000)}
    description = {"model": {"type": "WordLevel", "vocab": vocabulary}}
    (checkpoint / "tokenizer.json").write_text(json.dumps(description))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.unit.engine.service.engine_client.MODEL_PATH", str(checkpoint))
        async with start_engine() as engine:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await Gateway(engine, "another").hello()
            error = from_rpc_error(refused.value)
            assert isinstance(error, MillraceError)
            assert error.reason is Reason.VOCABULARY_MISMATCH
            info = await Gateway(engine, error.metadata["engine"]).hello()
            assert info.vocabulary_fingerprint == error.metadata["engine"]


@asynccontextmanager
async def attached(**settings: str) -> AsyncIterator[tuple[Engine, Gateway]]:
    """An engine of its own, and a gateway that has said who it is."""
    async with start_engine(**settings) as engine:
        gateway = Gateway(engine)
        await gateway.hello()
        yield engine, gateway


async def test_a_poisoned_request_is_isolated_and_the_others_finish() -> None:
    async with attached(SIMULATION__POISON_TOKEN_ID="666") as (engine, gateway):
        for handle in range(6):
            await gateway.submit(handle, [*PROMPT, 666 if handle == 3 else handle], max_tokens=20)
        outputs = await gateway.until_ended(6)
        assert outputs[3, 0][-1].error.reason == Reason.POISONED_REQUEST
        for handle in (0, 1, 2, 4, 5):
            assert tokens(outputs[handle, 0]) == expected(20, prompt=[*PROMPT, handle])
        assert await engine.serving()
        books = await engine.check()
        assert books.ok, books.violation
        assert books.num_unreferenced_blocks == books.num_total_blocks


async def test_a_broken_runner_ends_every_stream_and_the_process() -> None:
    async with attached(SIMULATION__BREAK_TOKEN_ID="666", SIMULATION__STEP_MS="5") as (engine, gateway):
        await gateway.submit(1, PROMPT, max_tokens=10_000)
        await gateway.until_begun()
        await gateway.submit(2, [*PROMPT, 666])
        outputs = await gateway.until_ended(2)
        assert {outputs[handle, 0][-1].error.reason for handle in (1, 2)} == {Reason.STEP_FAILED}
        assert await gateway.status() == grpc.StatusCode.UNAVAILABLE
        assert await asyncio.wait_for(engine.process.wait(), 30) == 70


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_dead_core_ends_every_stream_and_the_process(number: signal.Signals) -> None:
    async with attached(SIMULATION__STEP_MS="5") as (engine, gateway):
        await gateway.submit(1, PROMPT, max_tokens=10_000)
        await gateway.until_begun()
        os.kill(engine.core_pid, number)
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await gateway.until_ended(1)
        assert from_rpc_error(lost.value).reason is Reason.ENGINE_LOST
        assert await gateway.status() == grpc.StatusCode.UNAVAILABLE
        assert not await engine.serving()
        assert await asyncio.wait_for(engine.process.wait(), 30) == 70


async def test_a_long_step_is_no_hang_and_gateways_hear_of_the_front_meanwhile() -> None:
    async with attached(SIMULATION__STEP_MS="9000") as (_, gateway):
        await gateway.submit(1, PROMPT, max_tokens=1)
        num_beats = 0
        while not (message := await gateway.call.read()).outputs.outputs:
            num_beats += 1
        # More than the core's own, which says the load once before the step.
        assert num_beats > 3
        assert message.outputs.outputs[0].token_ids == expected(1)


async def test_sigterm_lets_running_requests_finish_and_refuses_new_ones() -> None:
    async with attached(SIMULATION__STEP_MS="5") as (engine, gateway):
        await gateway.submit(1, PROMPT, max_tokens=100)
        await gateway.until_begun()
        engine.process.terminate()
        while await engine.serving():
            pass
        await gateway.submit(2, PROMPT)
        outputs = await gateway.until_ended(2)
        assert tokens(outputs[1, 0])[-1] == expected(100)[-1]
        assert outputs[2, 0][-1].error.reason == Reason.DRAINING
        assert await asyncio.wait_for(engine.process.wait(), 30) == 0


async def test_the_drain_limit_ends_what_is_left() -> None:
    async with attached(SIMULATION__STEP_MS="5", DRAIN_LIMIT_S="0.05") as (engine, gateway):
        await gateway.submit(1, PROMPT, max_tokens=30_000)
        await gateway.until_begun()
        engine.process.terminate()
        outputs = await gateway.until_ended(1)
        assert outputs[1, 0][-1].error.reason == Reason.DRAINING
