"""Our engine and one with vLLM's core serve one checkpoint under one gateway: streams of the one that dies go
on at the other. Needs vLLM's environment, as test_vllm_killed does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import select

from gateway.ledger.tables import REQUESTS, open_ledger
from observability.emit.names import RESUBMISSIONS
from services.supervisor.models import write_engines
from services.supervisor.ports import free_ports
from services.supervisor.process import die_with_parent
from tests.chaos.streams import Answer, ask, assert_numbers, connected, first_of, numbers, plain
from tests.e2e.conftest import needs_weights
from tests.e2e.stack import LIMIT_S, START_LIMIT_S, VLLM_SETTINGS, Stack, eventually, running_stack

pytestmark = [pytest.mark.e2e, needs_weights, pytest.mark.timeout(900), pytest.mark.usefixtures("vllm")]

NUM_STREAMS = 12
NUM_TOKENS = 300
NUM_NUMBERS = 60


@dataclass
class Makes:
    """A stack with our engine, and one of the other make beside it that gateways may be told of."""

    stack: Stack
    other: subprocess.Popen[bytes]
    other_address: str

    @property
    def own_address(self) -> str:
        (address,) = self.stack.addresses("engine", "grpc")
        return address

    def tell(self, *addresses: str) -> None:
        """From now on gateways know these engines."""
        write_engines(self.stack.directory, addresses)

    def num_continued(self) -> float:
        return sum(
            reading.value(RESUBMISSIONS, outcome="continued") for reading in self.stack.metrics("gateway")
        )


@pytest.fixture
def makes(tmp_path: Path) -> Iterator[Makes]:
    with running_stack(tmp_path, "--engine", "millrace") as stack:
        (port,) = free_ports(1, "127.0.0.1")
        address, log = f"127.0.0.1:{port}", tmp_path / "logs" / "other.log"
        settings = {
            **stack.state.environment,
            **VLLM_SETTINGS,
            "MILLRACE_ENGINE__MAKE": "vllm",
            "MILLRACE_ENGINE__LISTEN": address,
            "MILLRACE_ENGINE__NUM_THREADS": "1",
        }
        with log.open("wb") as output:
            other = subprocess.Popen(
                [sys.executable, "-m", "engine", "--config", stack.state.config],
                stdout=output,
                stderr=output,
                env={**os.environ, **settings},
                preexec_fn=die_with_parent(signal.SIGTERM),  # noqa: PLW1509
            )
        try:
            ready = eventually(
                lambda: "ready engine" in log.read_text() or other.poll() is not None, START_LIMIT_S
            )
            assert ready, stack.transcript()
            assert other.poll() is None, stack.transcript()
            yield Makes(stack, other, address)
        finally:
            other.kill()
            other.wait()


async def ask_all(makes: Makes, victim: int) -> list[Answer]:
    """Streams that one engine alone has begun when it dies; every third is in a schema."""
    continued = makes.num_continued()
    async with connected(makes.stack, 3 * LIMIT_S) as client:
        begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
        streams = [
            asyncio.ensure_future(
                ask(
                    client,
                    makes.stack,
                    f"Tell story number {number}.",
                    event,
                    seed=number,
                    temperature=0.8 if number % 2 else 0.0,
                    **(plain(NUM_TOKENS) if number % 3 else numbers(NUM_NUMBERS, 600)),
                )
            )
            for number, event in enumerate(begun)
        ]
        await first_of(begun)
        # It stands still while gateways get to know who is to go on, so that nothing ends before that.
        os.kill(victim, signal.SIGSTOP)
        makes.tell(makes.own_address, makes.other_address)
        # Who stands still for long counts as lost already.
        known = await asyncio.to_thread(
            eventually, lambda: makes.stack.num_attached() == 2 or makes.num_continued() > continued
        )
        assert known, makes.stack.transcript()
        os.kill(victim, signal.SIGKILL)
        return await asyncio.gather(*streams)


def assert_whole(makes: Makes, answers: list[Answer], before: int) -> None:
    """Each answer has all that was asked for, and the ledger has each of them as its client saw it."""
    for number, answer in enumerate(answers):
        if number % 3:
            assert (answer.finish_reason, answer.completion_tokens) == ("length", NUM_TOKENS)
        else:
            assert_numbers(answer, NUM_NUMBERS)
    assert eventually(lambda: len(ledger(makes)) == before + NUM_STREAMS)
    assert sorted(ledger(makes)[before:]) == sorted(answer.completion_tokens for answer in answers)


def ledger(makes: Makes) -> list[int]:
    """Tokens of every answer, in the order in which they ended."""
    engine = open_ledger(f"sqlite:///{makes.stack.directory}/ledger.sqlite")
    with engine.connect() as connection:
        asked = select(REQUESTS.c.completion_tokens).order_by(REQUESTS.c.ended_unix_ms)
        return list(connection.execute(asked).scalars())


def test_streams_go_on_at_an_engine_of_the_other_make(makes: Makes) -> None:
    stack = makes.stack
    answers = asyncio.run(ask_all(makes, stack.pid("engine-0")))
    assert_whole(makes, answers, 0)
    continued = makes.num_continued()
    assert continued > 0, "nothing was under way at our engine"
    assert eventually(lambda: "engine-0 is ready again" in stack.output.read_text()), stack.transcript()
    stack.assert_nothing_leaked(makes.other_address)
    makes.tell(makes.other_address)
    assert eventually(lambda: makes.stack.num_attached() == 1)
    answers = asyncio.run(ask_all(makes, makes.other.pid))
    assert_whole(makes, answers, NUM_STREAMS)
    assert makes.num_continued() > continued, "nothing was under way at vLLM's"
    stack.assert_nothing_leaked()
