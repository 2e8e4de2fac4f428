"""docker-compose.yml in a real engine: it starts, answers, is traced, shares limits, and loses nothing."""

from __future__ import annotations

import contextlib
import json
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
from millrace.common.v1 import chat_pb2
from millrace.inference.v1 import inference_pb2, inference_pb2_grpc

from services import third_party_images
from tests.containers.engine import (
    KEY,
    LIMIT_PER_MINUTE,
    LIMITED_KEY,
    MODEL,
    PORTS,
    PROJECT,
    Compose,
    ask,
    run,
    size_mb,
    streams,
    wait_until,
)

pytestmark = pytest.mark.timeout(900)

OURS = ("gateway", "tokenizer", "engine")
# Long enough to be under way while containers are stopped, and short enough for their drain.
NUM_TOKENS = 1000


def test_everything_is_healthy(plain: Compose) -> None:
    states = plain.states()
    assert states.pop("configure") == ["exited"]
    # Their images have no client to ask them with.
    assert states.pop("collector") == states.pop("jaeger") == ["running"]
    assert {state for each in states.values() for state in each} == {"healthy"}
    assert len(states["gateway"]) == 2
    listed = (each.image for each in third_party_images.read_list().images)
    (base,) = (name for name in listed if name.startswith("python:"))
    base_mb = size_mb(base)
    for name in OURS:
        image = plain.inspect(name)[0]["Config"]["Image"]
        image_mb = size_mb(image)
        print(f"\n{image}: {image_mb:.0f} MB, {image_mb - base_mb:.0f} of them beyond {base}", end="")


def test_it_starts_in_seconds(plain: Compose) -> None:
    """Every container answers for its health within a second of its start, so waiting is short."""
    plain.do("stop")
    print(f"\nall containers healthy after {plain.up():.1f} s")
    for name in OURS:
        for each in plain.inspect(name):
            log = each["State"]["Health"]["Log"]
            assert log[-1]["ExitCode"] == 0, log
            assert each["Config"]["Healthcheck"]["Interval"] == 1_000_000_000


def test_both_faces_stream_answers(plain: Compose) -> None:
    answer = ask(plain.url)
    assert answer.status_code == 200, answer.text
    assert answer.text.rstrip().endswith("data: [DONE]")
    with grpc.insecure_channel(f"127.0.0.1:{PORTS['TEST_API_PORT']}") as channel:
        message = chat_pb2.Message(role=chat_pb2.ROLE_USER, content="Hello")
        request = inference_pb2.ChatRequest(
            model=MODEL, conversation=chat_pb2.Conversation(messages=[message])
        )
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        responses = list(stub.Chat(request, metadata=tuple(KEY.items()), timeout=60))
    assert len(responses) > 1
    assert ask(plain.url, key={"authorization": "Bearer mr-wrong"}).status_code == 401


def test_one_trace_leads_from_envoy_to_the_engine(plain: Compose) -> None:
    request_id = ask(plain.url).headers["x-request-id"]

    def is_whole() -> bool:
        traces = defaultdict(list)
        for span in plain.spans():
            traces[span["trace"]].append(span)
        for spans in traces.values():
            if any(request_id in span["attributes"].values() for span in spans):
                ids = {span["span"] for span in spans}
                roots = [span for span in spans if span["parent"] not in ids]
                # Envoy, gateway, tokenizer, engine; Envoy's span is above all others.
                return len({span["service"] for span in spans}) == 4 and len(roots) == 1
        return False

    wait_until(is_whole, "no whole trace of the request arrived")


def test_two_gateways_share_the_limits(plain: Compose) -> None:
    """Each of them alone would let as many pass; and only who has the password reaches their counters."""
    statuses = [ask(plain.url, key=LIMITED_KEY).status_code for _ in range(3 * LIMIT_PER_MINUTE)]
    assert sorted(statuses) == [200] * LIMIT_PER_MINUTE + [429] * 2 * LIMIT_PER_MINUTE
    refused = plain.do("exec", "-T", "-e", "REDISCLI_AUTH=", "redis", "valkey-cli", "dbsize")
    assert "NOAUTH" in refused


def test_engines_are_scaled_and_the_loss_of_one_is_not_noticed(plain: Compose) -> None:
    plain.up("--scale", "engine=2")
    try:
        with streams(plain.url, 4, NUM_TOKENS):
            plain.crash("engine")
    finally:
        plain.up("--scale", "engine=1")


@pytest.mark.parametrize(
    "service", ["engine", "tokenizer", "redis", "collector", "jaeger", "prometheus", "grafana"]
)
def test_streams_outlive_what_crashes(plain: Compose, service: str) -> None:
    """Also where it is the only one of its kind."""
    with streams(plain.url, 2, NUM_TOKENS):
        plain.crash(service)
    assert ask(plain.url).status_code == 200


def test_a_gateway_that_crashes_takes_its_own_streams_alone(plain: Compose) -> None:
    with ThreadPoolExecutor() as pool, streams(plain.url, 8, NUM_TOKENS, may_break=True) as under_way:
        crash = pool.submit(plain.crash, "gateway")
        statuses = set()
        while not crash.done():
            # Of an answer that had begun there the rest does not come.
            with contextlib.suppress(httpx.TransportError):
                statuses.add(ask(plain.url).status_code)
        crash.result()
    ends = [each.ended for each in under_way]
    assert "length" in ends
    assert len(set(ends)) > 1, "none was on the gateway that crashed"
    # Whose answer had not begun went to the other one.
    assert statuses == {200}


def test_envoy_is_started_again(plain: Compose) -> None:
    """There is one alone, and whoever is connected to it notices."""
    plain.crash("envoy")
    assert ask(plain.url).status_code == 200


@pytest.mark.parametrize("service", ["envoy", "gateway"])
def test_stopping_a_container_lets_its_streams_finish(plain: Compose, service: str) -> None:
    with streams(plain.url, 6, NUM_TOKENS):
        run("docker", "stop", "-t", "45", plain.containers(service)[0])
    plain.up()
    assert ask(plain.url).status_code == 200


def test_a_container_that_is_made_anew_lets_its_streams_finish(plain: Compose) -> None:
    with streams(plain.url, 6, NUM_TOKENS):
        plain.do("up", "--detach", "--no-build", "--no-deps", "--force-recreate", "envoy")
    plain.wait_healthy()
    assert ask(plain.url).status_code == 200


def test_a_gateway_that_leaves_refuses_nobody(plain: Compose) -> None:
    with ThreadPoolExecutor() as pool:
        leaving = pool.submit(run, "docker", "restart", "-t", "45", plain.containers("gateway")[0])
        statuses = set()
        while not leaving.done():
            statuses.add(ask(plain.url).status_code)
        leaving.result()
    assert statuses == {200}
    plain.wait_healthy()


def test_containers_are_replaced_one_at_a_time(plain: Compose) -> None:
    """services/roll.sh, while somebody asks without pause."""
    environment = {
        "COMPOSE_FILE": "docker-compose.yml:tests/containers/compose.yml",
        "COMPOSE_PROJECT_NAME": PROJECT,
        "TEST_CONFIG": str(plain.config),
    }
    old = set(plain.containers("gateway"))
    with ThreadPoolExecutor() as pool:
        rolling = pool.submit(run, "services/roll.sh", "gateway", environment=environment)
        statuses = set()
        while not rolling.done():
            statuses.add(ask(plain.url).status_code)
        rolling.result()
    assert statuses == {200}
    new = set(plain.containers("gateway"))
    assert len(new) == 2
    assert not old & new


def test_an_edited_configuration_is_applied_or_refused(plain: Compose) -> None:
    """Compose does not look into what it mounts, and an `up` that changed nothing must not look good."""
    before = plain.config.read_text()
    plain.config.write_text(before + "\n# Edited.\n")
    with pytest.raises(AssertionError, match="configure"):
        plain.up()
    assert "was edited" in plain.do("logs", "configure")
    plain.up("--force-recreate")
    plain.up()
    assert ask(plain.url).status_code == 200


def test_logs_have_no_noise_of_forks(plain: Compose) -> None:
    for name in OURS:
        log = plain.do("logs", "--no-color", name)
        assert "fork" not in log.lower(), log[-2000:]


def test_images_know_nothing_of_the_checkout_s_modes(plain: Compose) -> None:
    for name in OURS:
        listed = plain.do("exec", "-T", name, "find", "/app", "/etc/millrace", "!", "-readable")
        assert listed == ""


def test_stopping_everything_lets_streams_finish_and_their_spans_arrive(plain: Compose) -> None:
    senders, receivers = ("envoy", "gateway", "tokenizer", "engine"), ("collector", "jaeger", "prometheus")
    with streams(plain.url, 4, NUM_TOKENS):
        began_s = time.monotonic()
        plain.do("stop")
    print(f"\nstopped after {time.monotonic() - began_s:.1f} s")
    ends = {}
    for name in (*senders, *receivers):
        ids = plain.do("ps", "--all", "--quiet", name).split()
        states = [json.loads(run("docker", "inspect", each, "-f", "{{json .State}}")) for each in ids]
        assert {state["ExitCode"] for state in states} == {0}, name
        ends[name] = max(state["FinishedAt"] for state in states)
    assert min(ends[name] for name in receivers) >= max(ends[name] for name in senders), ends
    plain.up()
    assert ask(plain.url).status_code == 200
