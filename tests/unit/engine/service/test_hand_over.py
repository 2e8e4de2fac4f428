"""Prompts computed by one engine and answered by another: real engines, and real losses of them."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator
from urllib.request import urlopen

import pytest
import pytest_asyncio
from millrace.engine.v1 import engine_pb2

from checkpoint.vocabulary import checkpoint_fingerprint
from tests.unit.engine.service.engine_client import Engine, Gateway, signed, start_engine, tokens
from tests.unit.engine.service.test_prefix_disk import EACH_FORM

BASE = "models/millrace-nano"
PROMPT = [100 + (7 * each) % 190 for each in range(200)]
# All full blocks of the prompt.
NUM_HANDED_OVER = 192
pytestmark = pytest.mark.asyncio(loop_scope="module")
SETTINGS = {"simulated": "false", "metrics_listen": "127.0.0.1:0"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def receiver() -> AsyncIterator[Engine]:
    async with start_engine(BASE, **SETTINGS, role="decode") as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sender() -> AsyncIterator[Engine]:
    async with start_engine(BASE, **SETTINGS, role="prefill") as engine:
        yield engine


class Pair:
    """A gateway's streams to both."""

    def __init__(self, sender: Engine, receiver: Engine) -> None:
        self.sender, self.receiver = sender, receiver
        fingerprint = checkpoint_fingerprint(BASE)
        self.to_sender, self.to_receiver = Gateway(sender, fingerprint), Gateway(receiver, fingerprint)

    async def open(self) -> Pair:
        await self.to_sender.hello()
        await self.to_receiver.hello()
        return self

    async def prefill(self, salt: bytes, ticket: bytes, prompt: list[int] = PROMPT) -> list[int]:
        """The prompt's first token, whose blocks are held under the ticket."""
        await self.to_sender.submit(1, prompt, context=signed(cache_salt=salt), hand_over=ticket, **OPTIONS)
        (outputs,) = (await self.to_sender.until_ended(1)).values()
        assert outputs[-1].finish_reason == 2
        return tokens(outputs)

    async def decode(
        self, salt: bytes, given: list[int], source: engine_pb2.BlockSource | None, prompt: list[int] = PROMPT
    ) -> tuple[list[int], int]:
        """The whole answer, and how many of the prompt's tokens were not computed."""
        await self.to_receiver.submit(
            1, prompt, context=signed(cache_salt=salt), output=given, source=source, **OPTIONS
        )
        (outputs,) = (await self.to_receiver.until_ended(1)).values()
        first = next(each.first_token for each in outputs if each.HasField("first_token"))
        return [*given, *tokens(outputs)], first.cached_prompt_tokens

    def source(self, ticket: bytes) -> engine_pb2.BlockSource:
        return engine_pb2.BlockSource(address=self.sender.target, ticket=ticket)

    def close(self) -> None:
        self.to_sender.call.cancel()
        self.to_receiver.call.cancel()


OPTIONS = {"max_tokens": 24, "temperature": 0.8, "ignore_eos": True, "seed": 7}


async def whole(engine: Engine, salt: bytes) -> list[int]:
    """The answer by one engine alone."""
    gateway = Gateway(engine, checkpoint_fingerprint(BASE))
    await gateway.hello()
    await gateway.submit(1, PROMPT, context=signed(cache_salt=salt), **OPTIONS)
    (outputs,) = (await gateway.until_ended(1)).values()
    gateway.call.cancel()
    return tokens(outputs)


def counted(engine: Engine, name: str) -> float:
    with urlopen(f"http://{engine.metrics}/metrics") as page:
        lines = page.read().decode().splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(name)), 0.0)


async def free(engine: Engine) -> None:
    """Nothing is held any more."""
    async with asyncio.timeout(10):
        while (books := await engine.check()).num_unreferenced_blocks < books.num_total_blocks:
            await asyncio.sleep(0.005)
    assert books.ok, books.violation


async def test_blocks_move_once_and_the_answer_is_that_of_one_engine(
    sender: Engine, receiver: Engine
) -> None:
    expected = await whole(receiver, b"alone")
    pair = await Pair(sender, receiver).open()
    ticket = secrets.token_bytes(16)
    first = await pair.prefill(b"a", ticket)
    held = await sender.check()
    assert held.num_total_blocks - held.num_unreferenced_blocks == NUM_HANDED_OVER / 16
    assert await pair.decode(b"a", first, pair.source(ticket)) == (expected, NUM_HANDED_OVER)
    await free(sender)
    await free(receiver)
    pair.close()


async def test_blocks_of_every_form_move_too() -> None:
    """Layers of each, in one model."""
    form = SETTINGS | EACH_FORM
    async with (
        start_engine(BASE, **form, role="decode") as to,
        start_engine(BASE, **form, role="prefill") as of,
    ):
        expected = await whole(to, b"alone")
        pair = await Pair(of, to).open()
        first = await pair.prefill(b"a", ticket := secrets.token_bytes(16))
        assert await pair.decode(b"a", first, pair.source(ticket)) == (expected, NUM_HANDED_OVER)
        pair.close()


async def test_only_what_is_missing_moves(sender: Engine, receiver: Engine) -> None:
    pair = await Pair(sender, receiver).open()
    first = await pair.prefill(b"b", ticket := secrets.token_bytes(16))
    # The receiver has computed the first half for somebody else.
    await pair.decode(b"b", [], None, PROMPT[:100])
    before = counted(receiver, 'millrace_engine_hand_over_blocks_total{direction="in"}')
    answer = await pair.decode(b"b", first, pair.source(ticket))
    assert answer == (await whole(sender, b"alone"), NUM_HANDED_OVER)
    after = counted(receiver, 'millrace_engine_hand_over_blocks_total{direction="in"}')
    assert after - before == NUM_HANDED_OVER / 16 - 6
    pair.close()


async def failed(engine: Engine, reason: str, before: float) -> None:
    """Waits until one more pull has failed for the reason, by the engine's metrics."""
    async with asyncio.timeout(10):
        while counted(engine, FAILED.format(reason)) < before + 1:
            await asyncio.sleep(0.01)


FAILED = 'millrace_engine_hand_over_failures_total{{reason="{}"}}'


@pytest.mark.parametrize(
    ("reason", "salt", "address"),
    [("gone", b"c", ""), ("gone", b"other salt", ""), ("lost", b"d", "127.0.0.1:1")],
)
async def test_what_cannot_be_pulled_is_computed(
    sender: Engine, receiver: Engine, reason: str, salt: bytes, address: str
) -> None:
    """Let go before it is asked for; another tenant's, which has nothing of this prompt; no engine."""
    pair = await Pair(sender, receiver).open()
    before = counted(receiver, FAILED.format(reason))
    first = await pair.prefill(b"c" if salt == b"c" else b"tenant", ticket := secrets.token_bytes(16))
    if salt == b"c":
        await pair.to_sender.release(ticket)
        await free(sender)
    source = engine_pb2.BlockSource(address=address or sender.target, ticket=ticket)
    assert await pair.decode(salt, first, source) == (await whole(sender, b"alone"), 0)
    await failed(receiver, reason, before)
    pair.close()
    await free(sender)
    await free(receiver)


async def test_a_gateway_that_goes_leaves_nothing_behind(sender: Engine) -> None:
    pair = await Pair(sender, sender).open()
    await pair.prefill(b"f", secrets.token_bytes(16))
    assert (held := await sender.check()).num_unreferenced_blocks < held.num_total_blocks
    pair.close()
    await free(sender)


async def test_a_cancel_a_hang_and_a_death_in_the_middle(receiver: Engine) -> None:
    expected = await whole(receiver, b"alone")
    async with start_engine(BASE, **SETTINGS, role="prefill") as sender:
        pair = await Pair(sender, receiver).open()
        tickets = [secrets.token_bytes(16) for _ in range(3)]
        first, _, _ = [await pair.prefill(salt, each) for salt, each in zip(SALTS, tickets, strict=True)]
        # It answers nobody for now, so that a pull stays under way.
        os.kill(sender.core_pid, signal.SIGSTOP)
        await pair.to_receiver.submit(
            9,
            PROMPT,
            context=signed(cache_salt=SALTS[0]),
            output=first,
            source=pair.source(tickets[0]),
            **OPTIONS,
        )
        async with asyncio.timeout(10):
            while (books := await receiver.check()).num_unreferenced_blocks == books.num_total_blocks:
                await asyncio.sleep(0.002)
        await pair.to_receiver.cancel(9)
        await pair.to_receiver.until_ended(1)
        # As a gateway does: the receiver may not have got as far as asking.
        await pair.to_sender.release(tickets[0])
        await free(receiver)
        before = counted(receiver, FAILED.format("silence"))
        assert (await pair.decode(SALTS[1], first, pair.source(tickets[1])))[0] == expected
        await failed(receiver, "silence", before)
        # Both calls have ended, and their blocks are let go.
        os.kill(sender.core_pid, signal.SIGCONT)
        async with asyncio.timeout(10):
            while (books := await sender.check()).num_unreferenced_blocks < books.num_total_blocks - 12:
                await asyncio.sleep(0.002)
        before = counted(receiver, FAILED.format("lost"))
        sender.process.kill()
        await sender.process.wait()
        assert (await pair.decode(SALTS[2], first, pair.source(tickets[2])))[0] == expected
        await failed(receiver, "lost", before)
        pair.close()
    await free(receiver)


SALTS = (b"g", b"h", b"i")


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"hand_over": b"short"}, "hand_over"), ({"hand_over": bytes(16), "n": 2}, "hand_over")],
)
async def test_bad_tickets_are_refused(sender: Engine, fields: dict[str, object], field: str) -> None:
    gateway = Gateway(sender, checkpoint_fingerprint(BASE))
    await gateway.hello()
    await gateway.submit(1, PROMPT, **fields)  # type: ignore[arg-type]
    (outputs,) = (await gateway.until_ended(1)).values()
    assert outputs[-1].error.field == field
    gateway.call.cancel()


async def test_a_receiver_holds_nothing_for_others(receiver: Engine) -> None:
    gateway = Gateway(receiver, checkpoint_fingerprint(BASE))
    assert (await gateway.hello()).role == "decode"
    await gateway.submit(1, PROMPT, hand_over=bytes(16))
    (outputs,) = (await gateway.until_ended(1)).values()
    assert outputs[-1].error.field == "hand_over"
    gateway.call.cancel()
