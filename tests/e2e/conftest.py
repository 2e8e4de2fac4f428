"""One stack for the whole session, and books that must balance after every test."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import openai
import pytest
from millrace.inference.v1 import inference_pb2_grpc

from tests.e2e.makes import NOT_THERE
from tests.e2e.stack import MAKE, Stack, has_bundled_weights, running_stack
from tests.e2e.streaming import PACE
from tests.redis_server import RedisServer

# Of a test whose stack another make serves.
_MAKES_LIMIT_S = 600


@pytest.fixture(scope="session")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest.fixture
def stack(shared_stack: Stack) -> Iterator[Stack]:
    """The running stack; afterwards nothing may be left of the test in any engine."""
    yield shared_stack
    shared_stack.assert_nothing_leaked()


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack of this file's own, for what is done to its processes and ports."""
    with running_stack(tmp_path_factory.mktemp("stack"), "--simulated", environment=PACE) as stack:
        yield stack


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis of this file's own, for what is done to it."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with stack.openai() as client:
        yield client


@pytest.fixture
def stub(stack: Stack) -> Iterator[inference_pb2_grpc.InferenceServiceStub]:
    with stack.channel() as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


needs_weights = pytest.mark.skipif(
    not has_bundled_weights(), reason="the bundled model's weights are not here; tokens are simulated"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what the make that serves does not have; the reason stands beside the name. Its engines take
    minutes to start where processors are few, and that is a part of the first test's time.
    """
    for item in items:
        if MAKE and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_MAKES_LIMIT_S))
        left_out = NOT_THERE[MAKE]
        reason = left_out.get(item.name) or left_out.get(getattr(item, "originalname", item.name))
        if reason and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"{MAKE}: {reason}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What the processes wrote belongs to the report of a test that failed."""
    report = yield
    if report.failed:
        for name in ("shared_stack", "simulated"):
            stack = getattr(item, "funcargs", {}).get(name)
            if isinstance(stack, Stack):
                report.sections.append((f"{name}: end of every log", stack.transcript()))
    return report
