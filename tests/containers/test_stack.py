"""docker-compose.yml in a real engine: it starts, answers, is traced, shares limits, and loses nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from millrace.common.v1 import chat_pb2
from millrace.inference.v1 import inference_pb2, inference_pb2_grpc

from observability.emit import names
from services import third_party_images
from tests.containers.engine import (
    JAEGER,
    KEY,
    LIMIT_PER_MINUTE,
    LIMITED_KEY,
    MODEL,
    PORTS,
    PROMETHEUS,
    Compose,
    ask,
    run,
    serves,
    size_mb,
    streams,
    wait_traced,
    wait_until,
)

pytestmark = pytest.mark.timeout(900)

OURS = ("gateway", "tokenizer", "engine")
SENDERS, RECEIVERS = ("envoy", *OURS), ("collector", "jaeger", "prometheus")
# Long enough to be under way while containers are stopped, and short enough for their drain.
NUM_TOKENS = 1000
# Longer than it takes to kill a process, on a busy machine too.
LONG = 3 * NUM_TOKENS
# Two cores take 13 to 20 s.
START_LIMIT_S = 60.0
# Of a page that calls the API from a browser.
ORIGIN = "https://app.example"


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


def test_counters_are_there_before_their_first_event(plain: Compose) -> None:
    """Rates and alerts miss the first event of a series that begins with it."""
    assert ask(plain.url).status_code == 200
    expected = {
        "gateway": (names.RESUBMISSIONS, names.LEDGER_MISSING, names.TOOL_CALLS, names.GOODPUT),
        "tokenizer": (names.GRAMMAR_LOOKUPS, names.GRAMMAR_REFUSALS),
    }
    for service, counters in expected.items():
        for reading in plain.metrics(service).values():
            for counter in counters:
                ((label, values),) = counter.values.items()
                assert set(reading.values_by(counter, label)) == set(values), counter.name

    def outcomes() -> set[str]:
        pages = plain.metrics("gateway").values()
        return {outcome for each in pages for outcome in each.values_by(names.REQUESTS, "outcome")}

    wait_until(lambda: outcomes() == set(names.REQUESTS.values["outcome"]), "a slice lacks outcomes")


def test_no_container_is_promised_more_than_the_smallest_machine_has(plain: Compose) -> None:
    """The engine refuses a limit above the processors that there are."""
    for name in plain.states():
        for each in plain.inspect(name, "--all"):
            assert each["HostConfig"]["NanoCpus"] <= 1_000_000_000, name


def test_no_registry_is_asked_for_what_is_built_here(tmp_path: Path) -> None:
    """Where nobody has built it either. A registry that was asked is in the message, whatever it answered."""
    asking = tmp_path / "asking.yml"
    asking.write_text(yaml.safe_dump({"services": {name: {"pull_policy": "missing"} for name in OURS}}))
    starting = ("up", "--detach", "--no-build", "--no-deps", *OURS)
    variables = {"MILLRACE_TAG": "built-by-nobody"}
    told = {}
    for how, overlays in (("as it is", ()), ("asking", (str(asking),))):
        with Compose(*overlays, variables=variables, project="millrace-test-unbuilt") as stack:
            with pytest.raises(AssertionError) as refused:
                stack.do(*starting)
            told[how] = str(refused.value)
    assert "No such image: millrace/" in told["as it is"]
    assert not [word for word in ("registry", "Get ", "pull access") if word in told["as it is"]], told
    assert [word for word in ("registry", "Get ", "pull access") if word in told["asking"]], told


def _ends(stack: Compose, services: Iterable[str]) -> dict[str, str]:
    """When the last container of each stopped; fails if one did not end as it was told to."""
    ends = {}
    for name in services:
        states = [each["State"] for each in stack.inspect(name, "--all")]
        assert {state["ExitCode"] for state in states} == {0}, name
        ends[name] = max(state["FinishedAt"] for state in states)
    return ends


def test_it_starts_in_seconds(plain: Compose) -> None:
    """Every container answers for its health within a second of its start, so waiting is short. What takes
    spans and metrics stops after who sends them.
    """
    plain.do("stop")
    ends = _ends(plain, (*SENDERS, *RECEIVERS))
    assert min(ends[name] for name in RECEIVERS) >= max(ends[name] for name in SENDERS), ends
    took_s = plain.up()
    print(f"\nall containers healthy after {took_s:.1f} s")
    assert took_s < START_LIMIT_S
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
    """And the command line draws it from the deployment's own store."""
    request_id = ask(plain.url).headers["x-request-id"]
    wait_traced([request_id])
    told = run(".venv/bin/millrace", "why", request_id, "--jaeger", JAEGER)
    assert "computing its own prompt" in told, told


def test_two_gateways_share_the_limits(plain: Compose) -> None:
    """Each of them alone would let as many pass; and only who has the password reaches their counters."""
    statuses = [ask(plain.url, key=LIMITED_KEY).status_code for _ in range(3 * LIMIT_PER_MINUTE)]
    assert sorted(statuses) == [200] * LIMIT_PER_MINUTE + [429] * 2 * LIMIT_PER_MINUTE
    refused = plain.do("exec", "-T", "-e", "REDISCLI_AUTH=", "redis", "valkey-cli", "dbsize")
    assert "NOAUTH" in refused


def test_engines_are_scaled_and_the_loss_of_one_is_not_noticed(plain: Compose) -> None:
    plain.up("--scale", "engine=2")
    try:
        wait_until(lambda: _num_engines(plain) == {2.0}, "gateways do not attach to both engines")
        continued = plain.num_continued()
        with streams(plain.url, 4, LONG) as under_way:
            loads = {
                each: reading.value(names.REQUESTS_RUNNING)
                for each, reading in plain.metrics("engine").items()
            }
            busiest = max(loads, key=loads.__getitem__)
            assert loads[busiest] > 0, loads
            plain.crash("engine", under_way, busiest)
        assert plain.num_continued() > continued, "the engine that crashed had no stream"
    finally:
        plain.up("--scale", "engine=1")


def _num_engines(stack: Compose) -> set[float]:
    """To how many the gateways are attached."""
    return {each.value(names.ENGINES_UP) for each in stack.metrics("gateway").values()}


@pytest.mark.parametrize(
    "service", ["engine", "tokenizer", "redis", "collector", "jaeger", "prometheus", "grafana"]
)
def test_streams_outlive_what_crashes(plain: Compose, service: str) -> None:
    """Also where it is the only one of its kind."""
    continued = plain.num_continued()
    with streams(plain.url, 2, LONG) as under_way:
        plain.crash(service, under_way)
    # An engine alone holds streams that somebody has to go on with.
    gone_on = plain.num_continued() - continued
    assert gone_on >= 2 if service == "engine" else gone_on == 0
    assert ask(plain.url).status_code == 200


def test_a_gateway_that_crashes_takes_its_own_streams_alone(plain: Compose) -> None:
    with ThreadPoolExecutor() as pool, streams(plain.url, 8, LONG, may_break=True) as under_way:
        crash = pool.submit(plain.crash, "gateway", under_way)
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


def test_a_gateway_that_leaves_says_so_takes_requests_still_and_then_refuses(plain: Compose) -> None:
    """And is alive until its streams have ended: whoever asked whether it lives would kill it otherwise."""
    address = plain.address("gateway")
    health, url = f"{address}:50051", f"http://{address}:8000"
    assert serves(health)
    with ThreadPoolExecutor() as pool, streams(url, 2, 3 * NUM_TOKENS) as under_way:
        leaving = pool.submit(run, "docker", "stop", "-t", "45", plain.containers("gateway")[0])
        wait_until(lambda: not serves(health), "it does not say that it leaves")
        assert ask(url).status_code == 200, "it refuses before anybody can know"
        wait_until(lambda: ask(url).status_code == 503, "it takes requests for ever")
        assert serves(health, "live")
        assert not [each.ended for each in under_way if each.ended], "they ended before it refused"
    leaving.result()
    plain.up()


def test_a_gateway_that_leaves_refuses_nobody(plain: Compose) -> None:
    with ThreadPoolExecutor() as pool:
        leaving = pool.submit(run, "docker", "restart", "-t", "45", plain.containers("gateway")[0])
        statuses = set()
        while not leaving.done():
            statuses.add(ask(plain.url).status_code)
        leaving.result()
    assert statuses == {200}
    plain.wait_healthy()


@pytest.mark.parametrize("service", ["gateway", "engine"])
def test_containers_are_replaced_one_at_a_time(plain: Compose, service: str) -> None:
    """services/roll.sh, while somebody asks without pause."""
    old = set(plain.containers(service))
    with ThreadPoolExecutor() as pool:
        rolling = pool.submit(plain.run, "services/roll.sh", service)
        statuses = set()
        while not rolling.done():
            statuses.add(ask(plain.url).status_code)
        rolling.result()
    assert statuses == {200}
    new = set(plain.containers(service))
    assert len(new) == len(old)
    assert not old & new


def test_prometheus_reaches_everybody_and_can_evaluate_every_rule(plain: Compose) -> None:
    def asked(what: str) -> dict[str, Any]:
        with httpx.Client(trust_env=False) as client:
            return dict(client.get(f"{PROMETHEUS}/api/v1/{what}").raise_for_status().json()["data"])

    def are_up() -> bool:
        up: dict[str, set[str]] = {}
        for target in asked("targets")["activeTargets"]:
            up.setdefault(target["labels"]["job"], set()).add(target["health"])
        return set(up) >= {"envoy", *OURS} and all(health == {"up"} for health in up.values())

    wait_until(are_up, f"not all targets are up: {asked('targets')['activeTargets']}")
    rules = [rule for group in asked("rules")["groups"] for rule in group["rules"]]
    assert rules
    assert [rule for rule in rules if rule["health"] == "err"] == []


def test_an_edited_configuration_is_applied_or_refused(plain: Compose) -> None:
    """Compose does not look into what it mounts, and an `up` that changed nothing must not look good."""
    before, running = plain.config.read_text(), set(plain.containers("gateway"))
    plain.config.write_text(f'{before}\n[envoy]\ncors_origins = ["{ORIGIN}"]\n')
    with pytest.raises(AssertionError, match="configure"):
        plain.up()
    told = plain.do("logs", "configure")
    assert "was edited" in told
    assert "docker compose up --detach --build" in told
    assert not _allowed_origin(plain)
    plain.up("--build")
    assert not running & set(plain.containers("gateway"))
    assert _allowed_origin(plain) == ORIGIN
    # Nothing is left to be applied.
    plain.up()


def _allowed_origin(stack: Compose) -> str:
    """What the edge says of a page that asks from elsewhere."""
    answer = ask(stack.url, headers={"origin": ORIGIN})
    assert answer.status_code == 200, answer.text
    return str(answer.headers.get("access-control-allow-origin", ""))


def test_an_edit_that_reached_gateways_one_at_a_time_is_refused_no_more(plain: Compose) -> None:
    """As `make roll` has it."""
    plain.config.write_text(plain.config.read_text() + "\n# Edited.\n")
    plain.do("build")
    plain.run("services/roll.sh", "gateway")
    running = set(plain.containers("gateway"))
    plain.up()
    assert set(plain.containers("gateway")) == running
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
    """What keeps them in memory stays to be asked; that it stops last is seen where everything stops."""
    try:
        with streams(plain.url, 4, NUM_TOKENS) as under_way:
            began_s = time.monotonic()
            plain.do("stop", *SENDERS, "collector")
        print(f"\nstopped after {time.monotonic() - began_s:.1f} s")
        ends = _ends(plain, (*SENDERS, "collector"))
        assert ends["collector"] >= max(ends[name] for name in SENDERS), ends
        wait_traced(each.request_id for each in under_way)
    finally:
        plain.up()
    assert ask(plain.url).status_code == 200
