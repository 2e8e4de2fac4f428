"""compose.vllm.yml in a real engine, with vLLM's build for CPUs. Its image has gigabytes and takes minutes to
build, so it is asked for by itself (TEST_CONTAINERS_VLLM=1).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.containers.engine import Compose, ask, run, size_mb, streams, wait_traced
from tests.e2e.stack import VLLM_SETTINGS

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.environ.get("TEST_CONTAINERS_VLLM") != "1", reason="TEST_CONTAINERS_VLLM is not 1"),
]

NUM_TOKENS = 200


@pytest.fixture(scope="module")
def stack() -> Iterator[Compose]:
    variables = {"VLLM_DTYPE": VLLM_SETTINGS.get("MILLRACE_ENGINE__DTYPE", "auto")}
    with Compose("compose.vllm.yml", "tests/containers/vllm.yml", variables=variables) as stack:
        print(f"\nready after {stack.up():.0f} s", end="")
        yield stack


def test_vllm_serves_as_any_engine_does(stack: Compose) -> None:
    (engine,) = stack.inspect("engine")
    image = engine["Config"]["Image"]
    print(f"\n{image}: {size_mb(image):.0f} MB", end="")
    assert engine["State"]["Health"]["Status"] == "healthy"
    assert engine["HostConfig"]["ReadonlyRootfs"]
    assert "VLLM::" in run("docker", "top", engine["Id"], "-o", "pid,comm")
    answer = ask(stack.url)
    assert answer.status_code == 200, answer.text
    assert answer.text.rstrip().endswith("data: [DONE]")
    wait_traced([answer.headers["x-request-id"]])


def test_it_finishes_what_is_under_way_when_it_is_stopped(stack: Compose) -> None:
    (engine,) = stack.containers("engine")
    with ThreadPoolExecutor(1) as pool, streams(stack.url, 2, NUM_TOKENS):
        stopping = pool.submit(run, "docker", "stop", "--time", "45", engine)
    stopping.result()
    (stopped,) = stack.inspect("engine", "--all")
    assert stopped["State"]["ExitCode"] == 0
