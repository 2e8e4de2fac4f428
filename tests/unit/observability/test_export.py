"""The standard's variables: what a process that is started with them sends, to real receivers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from importlib import metadata
from typing import Any

import pytest
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

from observability.emit import tracing
from observability.emit.config import Export, ObservabilityConfig
from observability.emit.tracing import Telemetry
from runtime.errors import ConfigError
from tests.unit.observability.receivers import RECEIVERS, Received, over_grpc

_CHILD = """
import json, random, sys
from observability.emit import names, tracing
from observability.emit.config import ObservabilityConfig
random.seed(0)
telemetry = tracing.setup("gateway", ObservabilityConfig(**json.loads(sys.argv[1])))
for _ in range(int(sys.argv[2])):
    span = telemetry.start(names.GATEWAY_REQUEST, parent=tracing.RemoteSpan(sys.argv[3]))
    telemetry.end(span, attributes={"first": 1, "second": 2})
print(tracing.traceparent_of(span)[0])
telemetry.shutdown()
"""
SAMPLED = f"00-{'a' * 32}-{'b' * 16}-01"
NOT_SAMPLED = f"00-{'a' * 32}-{'b' * 16}-00"
# Where nobody listens.
AWAY = "http://127.0.0.1:1"


def run(variables: dict[str, str], *, count: int = 1, parent: str = "", **config: Any) -> str:
    """A process with these variables that makes so many spans and ends; what the last one tells others."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    found = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(config), str(count), parent],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout.strip()


def at(received: Received, **more: str) -> dict[str, str]:
    """Variables that send there."""
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": received.endpoint, **more}


@pytest.mark.parametrize("protocol", RECEIVERS)
def test_endpoint_protocol_and_headers_win_over_the_file(protocol: str) -> None:
    with RECEIVERS[protocol]() as received:
        variables = at(
            received,
            OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
            OTEL_EXPORTER_OTLP_HEADERS="x-api-key=abc%20d,other=2",
        )
        run(variables, otlp_endpoint="127.0.0.1:1")
        assert len(received.spans) == 1
        assert received.headers["x-api-key"] == "abc d"
        assert received.path in {"", "/v1/traces"}


@pytest.mark.parametrize("protocol", RECEIVERS)
def test_the_endpoint_of_traces_wins_and_is_taken_as_it_is(protocol: str) -> None:
    with RECEIVERS[protocol]() as received:
        path = "" if protocol == "grpc" else "/here"
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": AWAY,
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": received.endpoint + path,
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol,
        }
        run(variables)
        assert len(received.spans) == 1
        assert received.path == path


@pytest.mark.parametrize("protocol", RECEIVERS)
def test_the_files_endpoint_is_used_over_the_protocol_of_the_environment(protocol: str) -> None:
    with RECEIVERS[protocol]() as received:
        endpoint = received.endpoint.removeprefix("http://")
        run({"OTEL_EXPORTER_OTLP_PROTOCOL": protocol}, otlp_endpoint=endpoint)
        assert len(received.spans) == 1
        assert received.path in {"", "/v1/traces"}


def test_a_local_store_gets_every_span_beside_the_receiver_of_the_environment() -> None:
    with RECEIVERS["http/protobuf"]() as named, over_grpc() as store:
        variables = at(named, OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf")
        run(variables, count=3, store_endpoint=store.endpoint.removeprefix("http://"))
        assert {span.span_id for span in named.spans} == {span.span_id for span in store.spans}
        assert len(store.spans) == 3


def test_resources_tell_processes_apart_and_take_in_the_environments() -> None:
    with over_grpc() as received:
        run(at(received))
        run(at(received))
        first, second = received.resources
        assert (first["service.name"], first["service.namespace"]) == ("gateway", "millrace")
        assert first["service.version"] == metadata.version("millrace")
        assert first["service.instance.id"] != second["service.instance.id"]
        attributes = "service.instance.id=mine,deployment.environment.name=test"
        run(at(received, OTEL_RESOURCE_ATTRIBUTES=attributes, OTEL_SERVICE_NAME="front"))
        third = received.resources[-1]
        assert third["service.instance.id"] == "mine"
        assert third["deployment.environment.name"] == "test"
        assert third["service.name"] == "front"
        assert third["service.namespace"] == "millrace"


def test_seeded_processes_do_not_repeat_ids() -> None:
    with over_grpc() as received:
        run(at(received), count=2)
        run(at(received), count=2)
        assert len({span.trace_id for span in received.spans}) == 4
        assert len({span.span_id for span in received.spans}) == 4


@pytest.mark.parametrize(
    ("variables", "config", "shares"),
    [
        ({}, {}, (1.0, 1.0, 0.0)),
        ({}, {"sample_ratio": 0.0}, (0.0, 1.0, 0.0)),
        ({"OTEL_TRACES_SAMPLER": "always_on"}, {"sample_ratio": 0.0}, (1.0, 1.0, 1.0)),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, {}, (0.0, 1.0, 0.0)),
        (
            {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"},
            {},
            (0.5, 1.0, 0.0),
        ),
    ],
)
def test_samplers(variables: dict[str, str], config: dict[str, Any], shares: tuple[float, ...]) -> None:
    """Shares of spans without a parent, with one that is recorded and with one that is not."""
    count = 400
    for parent, share in zip(("", SAMPLED, NOT_SAMPLED), shares, strict=True):
        with over_grpc() as received:
            run(at(received, **variables), count=count, parent=parent, **config)
            # Ten standard deviations.
            assert len(received.spans) == pytest.approx(share * count, abs=100 if share == 0.5 else 0)


@pytest.mark.parametrize("variable", ["OTEL_SDK_DISABLED=true", "OTEL_TRACES_EXPORTER=none"])
def test_where_nothing_is_recorded_the_callers_trace_goes_on(variable: str) -> None:
    name, _, value = variable.partition("=")
    with over_grpc() as received:
        assert run(at(received, **{name: value}), parent=SAMPLED) == SAMPLED
        assert received.messages == []


def test_batches_and_limits_of_spans() -> None:
    with over_grpc() as received:
        variables = {
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "10",
            "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "1",
        }
        run(at(received, **variables), count=35)
        # Ending sends what is left.
        assert len(received.spans) == 35
        assert len(received.messages) >= 4
        assert [len(span.attributes) for span in received.spans] == [1] * 35


def test_arguments_of_the_batch_processor_are_those_that_no_variable_gives() -> None:
    config = ObservabilityConfig(export_delay_ms=70, max_queued_spans=500)
    assert config.batching({}) == {
        "max_queue_size": 500, "schedule_delay_millis": 70, "max_export_batch_size": 500
    }  # fmt: skip
    assert config.batching({"OTEL_BSP_MAX_QUEUE_SIZE": "40", "OTEL_BSP_SCHEDULE_DELAY": "5"}) == {
        "max_export_batch_size": 40
    }


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "half"},
        {"OTEL_BSP_MAX_QUEUE_SIZE": "many"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ":4317"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "not a url"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:port"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "ftp://c:4317"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://[c:4317"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_HEADERS": "x-api-key=secret%0d%0ax:y"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "x%0ay=secret"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c", "OTEL_EXPORTER_OTLP_CERTIFICATE": "/no/such.pem"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c", "OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY": "/no/such.pem"},
    ],
)
def test_what_cannot_be_used_is_named(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=list(variables)[-1]) as caught:
        ObservabilityConfig().check(variables)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_endpoint_of_the_file_that_cannot_be_used_is_named() -> None:
    with pytest.raises(ConfigError, match=r"observability\.otlp_endpoint"):
        ObservabilityConfig(otlp_endpoint="http://").check({})


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ENDPOINT": "http://c:4317"}, Export(url="http://c:4317", is_standard=True)),
        ({"ENDPOINT": "c:4317"}, Export(url="https://c:4317", is_standard=True)),
        ({"ENDPOINT": "c:4317", "INSECURE": "true"}, Export(url="http://c:4317", is_standard=True)),
        (
            {
                "ENDPOINT": "https://c/base/",
                "PROTOCOL": "http/protobuf",
                "HEADERS": "k=v",
                "CERTIFICATE": "ca",
            },
            Export(
                url="https://c/base/v1/traces",
                protocol="http/protobuf",
                is_standard=True,
                headers={"k": "v"},
                certificate="ca",
            ),
        ),
    ],
)
def test_envoy_is_told_what_the_exporter_of_the_sdk_reads(
    variables: dict[str, str], expected: Export
) -> None:
    environ = {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in variables.items()}
    assert ObservabilityConfig(otlp_endpoint="other:1").exports(environ) == (expected,)


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({}, "http://localhost:4317"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http://localhost:4318/v1/traces"),
    ],
)
def test_an_exporter_that_is_named_without_a_receiver_has_the_standards(
    variables: dict[str, str], url: str
) -> None:
    environ = {"OTEL_TRACES_EXPORTER": "otlp", **variables}
    (found,) = ObservabilityConfig().exports(environ)
    assert (found.url, found.is_standard) == (url, True)
    (own,) = ObservabilityConfig(otlp_endpoint="http://mine:1/x").exports(environ)
    assert own.url == "http://mine:1/x"
    assert ObservabilityConfig().exports(variables) == ()


def test_a_receiver_that_is_away_loses_spans_and_nothing_else() -> None:
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": AWAY, "OTEL_BSP_MAX_QUEUE_SIZE": "10"}
    assert run(variables, count=100, parent=SAMPLED).startswith(f"00-{'a' * 32}-")


def test_a_receiver_that_never_answers_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    class Stuck(SpanProcessor):
        def shutdown(self) -> None:
            answered.wait()

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Stuck())
    monkeypatch.setattr(tracing, "_SHUTDOWN_LIMIT_S", 0.01)
    Telemetry("gateway", ObservabilityConfig(), provider).shutdown()
    assert not answered.is_set()
    answered.set()
