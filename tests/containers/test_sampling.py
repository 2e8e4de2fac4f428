"""The collector's own choice of traces: where its real image could be had, by its own program."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import yaml

from observability.analysis.decode import StoredSpan
from observability.analysis.jaeger import JaegerReader
from observability.emit.names import TtftPart
from tests.containers.engine import JAEGER, PROJECT, Compose, run, wait_until
from tests.deployment.containerfile import REPOSITORY
from tests.unit.observability.planted import message, request_trace

pytestmark = pytest.mark.timeout(900)

NAME = "millrace-test-collector"
NETWORK = f"{PROJECT}_inside"
METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
SECOND_NS = 1_000_000_000

Send = Callable[[list[StoredSpan]], None]


@pytest.fixture
def send(plain: Compose, tmp_path: Path) -> Iterator[Send]:
    """Sends spans to a collector that keeps none of the rest, and passes on to the stack's Jaeger."""
    (running,) = plain.inspect("collector")
    image = running["Config"]["Image"]
    program = json.loads(run("docker", "image", "inspect", "-f", "{{json .Config.Entrypoint}}", image))
    if program[0] == "python":
        pytest.skip(f"the registry of {image} cannot be reached: what stands in for it samples nothing")
    config = yaml.safe_load((REPOSITORY / "observability/collector/config.yaml").read_text())
    sampling = config["processors"]["tail_sampling"]
    sampling["policies"] = [each for each in sampling["policies"] if each["type"] != "probabilistic"]
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    file.chmod(0o644)
    mount = ("--volume", f"{file}:/etc/otelcol/config.yaml:ro")
    words = ("--name", NAME, "--network", NETWORK, *mount, image, *running["Config"]["Cmd"])
    run("docker", "run", "--detach", *words)
    try:
        networks = json.loads(run("docker", "inspect", "-f", "{{json .NetworkSettings.Networks}}", NAME))
        with grpc.insecure_channel(f"{networks[NETWORK]['IPAddress']}:4317") as channel:
            export = channel.unary_unary(METHOD)
            yield lambda spans: export(message(spans), timeout=60, wait_for_ready=True) and None
    finally:
        run("docker", "rm", "--force", NAME)


def test_what_was_slow_is_kept_whole_and_what_was_not_is_not(send: Send) -> None:
    """A first token after a second and a half in a short trace; one that ends when its beginning is old."""
    now_ns = time.time_ns()
    ordinary = request_trace(number=1, start_ns=now_ns - SECOND_NS)
    slow_first = request_trace(number=2, start_ns=now_ns - 2 * SECOND_NS, parts_ms={TtftPart.PREFILL: 1500.5})
    long = request_trace(number=3, start_ns=now_ns - 8 * SECOND_NS, decode_ms=7000.0)
    # By itself it is as short as what is not kept.
    beginning = [span for span in long if span.end_ns - span.start_ns < SECOND_NS]
    for spans in (beginning, ordinary, slow_first):
        send(spans)
    with contextlib.closing(JaegerReader(JAEGER)) as reader:

        def is_whole(spans: list[StoredSpan]) -> bool:
            found = {span.span_id for span in reader.trace(spans[0].trace_id)}
            return found == {span.span_id for span in spans}

        wait_until(lambda: is_whole(slow_first), "a slow first token is not kept")
        # By now a trace has been decided about that does not wait for its root.
        send([span for span in long if span not in beginning])
        wait_until(lambda: is_whole(long), "a long trace is not kept whole")
        assert reader.trace(ordinary[0].trace_id) == []
