"""compose.vllm.yml in a real engine, with vLLM's build for CPUs. Its image has gigabytes and takes minutes to
build, so it is asked for by itself (TEST_CONTAINERS_VLLM=1).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.containers.engine import LIMIT_S, TAG, Compose, ask, run, size_mb, streams, wait_traced, wait_until
from tests.e2e.stack import VLLM_SETTINGS

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.environ.get("TEST_CONTAINERS_VLLM") != "1", reason="TEST_CONTAINERS_VLLM is not 1"),
]

NUM_TOKENS = 200
IMAGE = f"millrace/engine:{TAG}-vllm"
GROUP_SCRIPT = "/app/services/engine/vllm-group.sh"


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


@pytest.fixture
def group() -> Iterator[tuple[str, str]]:
    """The two pods of a group as the LeaderWorkerSet starts them: the leader, here with a simulated engine as
    vLLM's build for CPUs knows no Ray, and a rank.
    """
    network, leader, rank = (f"millrace-test-{name}" for name in ("group", "leader", "rank"))
    run("docker", "network", "create", "--internal", network)
    try:
        for name, index in ((leader, "0"), (rank, "1")):
            variables = {
                "LWS_LEADER_ADDRESS": leader,
                "LWS_GROUP_SIZE": "2",
                "LWS_WORKER_INDEX": index,
                "MILLRACE_ENGINE__MAKE": "millrace",
                "MILLRACE_ENGINE__SIMULATED": "true",
                "MILLRACE_SECURITY__CONTEXT_SECRET": "of-the-test-alone",
            }
            given = [word for name_value in variables.items() for word in ("--env", "=".join(name_value))]
            hardened = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
            places = ("--tmpfs", "/tmp:size=2g,mode=1777,exec", "--shm-size", "1g", "--network", network)
            command = ("--entrypoint", "sh", IMAGE, GROUP_SCRIPT)
            run("docker", "run", "--detach", "--name", name, *hardened, *places, *given, *command)
        yield leader, rank
    finally:
        for name in (leader, rank):
            run("docker", "rm", "--force", name)
        run("docker", "network", "rm", network)


def _succeeds(container: str, *words: str) -> bool:
    done = subprocess.run(["docker", "exec", container, *words], capture_output=True, check=False)
    return done.returncode == 0


def test_the_pods_of_a_group_meet_and_a_rank_leaves_with_its_leader(group: tuple[str, str]) -> None:
    leader, rank = group
    joined = ("sh", GROUP_SCRIPT, "--is-joined")
    # As its probes ask it.
    wait_until(lambda: _succeeds(rank, *joined), "the rank has no leader")
    nodes = "import ray; ray.init('auto'); assert sum(each['Alive'] for each in ray.nodes()) == 2"
    wait_until(lambda: _succeeds(leader, "/opt/vllm/bin/python", "-c", nodes), "they are not two")
    serving = ("python", "-m", "runtime.healthcheck", "127.0.0.1:50071")
    wait_until(lambda: _succeeds(leader, *serving), "the leader's engine does not serve")
    with ThreadPoolExecutor(1) as pool:
        # A rank that is stopped waits for this first, so that what is under way ends.
        leaving = pool.submit(_succeeds, rank, "sh", GROUP_SCRIPT, "--until-leader-leaves")
        assert _succeeds(rank, *joined)
        assert not leaving.done()
        run("docker", "stop", "--time", "30", leader)
        leaving.result(LIMIT_S)
    running = ("docker", "inspect", "--format", "{{.State.Running}}", rank)
    wait_until(lambda: run(*running).strip() == "false", "the rank stays without its leader")
