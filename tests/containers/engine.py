"""The Docker engine as these tests use it, and clients of what runs in it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx

from observability.analysis.jaeger import JaegerReader
from observability.analysis.scrape import Reading, scrape
from observability.emit import names
from runtime import healthcheck
from tests.deployment.containerfile import REPOSITORY

KEY = {"authorization": "Bearer mr-dev-local"}
# Of another tenant.
READER_KEY = {"authorization": "Bearer mr-reader"}
# Of a tenant with a limit.
LIMITED_KEY = {"authorization": "Bearer mr-limited"}
LIMIT_PER_MINUTE = 6
MODEL = "millrace-nano"
# Of compose.models.yml and the component `second-model`.
SECOND_MODEL = "millrace-nano-draft"
PORTS = {"TEST_API_PORT": "18080", "TEST_JAEGER_PORT": "18686", "TEST_PROMETHEUS_PORT": "18090"}
JAEGER = f"http://127.0.0.1:{PORTS['TEST_JAEGER_PORT']}"
PROMETHEUS = f"http://127.0.0.1:{PORTS['TEST_PROMETHEUS_PORT']}"
PROJECT = "millrace-test"
# Of the images that `prepare.sh` has built: nobody's own are replaced.
TAG = os.environ.get("MILLRACE_TAG", "test")
# No test waits longer for anything.
LIMIT_S = 240.0


def run(*words: str, folder: Path = REPOSITORY, environment: Mapping[str, str] | None = None) -> str:
    """Standard output of a command; fails with all that it said."""
    done = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **PORTS, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr[-4000:]}"
    return done.stdout


def wait_until(condition: Callable[[], bool], what: object) -> None:
    """Returns when it holds; fails after LIMIT_S and tells what there is then."""
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, str(what)
        time.sleep(0.2)


def copy_checkout(folder: Path) -> None:
    """What is in the repository, as somebody has it whose umask is 077."""
    tracked = [name for name in run("git", "ls-files", "-z").split("\0") if (REPOSITORY / name).is_file()]
    packed = subprocess.run(
        ["tar", "-C", str(REPOSITORY), "--no-recursion", "-cf", "-", *tracked],
        check=True,
        capture_output=True,
    ).stdout
    command = f"umask 077 && tar -C '{folder}' --no-same-permissions -xf -"
    subprocess.run(["sh", "-c", command], input=packed, check=True)


def serves(address: str, service: str = "") -> bool:
    """Whether a process says of itself that it does, over gRPC."""
    # It says on every attempt what is missing.
    with contextlib.redirect_stderr(io.StringIO()):
        return healthcheck.main([address, service]) == 0


def make_certificates(folder: Path) -> Path:
    """What `make certificates` writes, readable to nobody but the owner and the group."""
    run("sh", "services/envoy/make-certificates.sh", str(folder))
    if os.geteuid() == 0:
        # A group that no image knows.
        run("chgrp", "-R", "12345", str(folder))
    return folder


class Compose(AbstractContextManager["Compose"]):
    """docker-compose.yml with overlays, in a copy of the checkout and as a project of its own; gone with its
    volumes at the end.
    """

    def __init__(
        self, *overlays: str, variables: Mapping[str, str] | None = None, project: str = PROJECT
    ) -> None:
        # Tests edit it. All of it is closed to others, but for what `make up` opens.
        self._folder = tempfile.TemporaryDirectory(prefix="millrace-checkout-")
        self.checkout = Path(self._folder.name)
        copy_checkout(self.checkout)
        run("make", "--silent", "mounted", folder=self.checkout)
        file = "config/millrace.toml"
        if "compose.models.yml" in overlays:
            file = "k8s/components/second-model/millrace.toml"
        self.config = self.checkout / file
        with self.config.open("a") as config:
            config.write(f"\n[tenants.limited]\nrequests_per_minute = {LIMIT_PER_MINUTE}\n")
            config.write('[tenants.reader]\ntier = "standard"\n')
        self.environment = {
            "COMPOSE_FILE": ":".join(("docker-compose.yml", "tests/containers/compose.yml", *overlays)),
            "COMPOSE_PROJECT_NAME": project,
            "MILLRACE_TAG": TAG,
            **(variables or {}),
        }
        index = REPOSITORY / "build/containers/torch_index"
        if index.is_file() and (given := index.read_text().strip()):
            self.environment["TORCH_INDEX"] = given
        self.url = f"http://127.0.0.1:{PORTS['TEST_API_PORT']}"

    def __exit__(self, *_: object) -> None:
        self.do("down", "--volumes", "--timeout", "5")
        self._folder.cleanup()

    def do(self, *words: str) -> str:
        """Output of a command of compose."""
        return self.run("docker", "compose", *words)

    def run(self, *words: str) -> str:
        """Output of a command in the checkout, with the variables that name this project."""
        return run(*words, folder=self.checkout, environment=self.environment)

    def up(self, *words: str) -> float:
        """Starts what does not run, and waits until all is healthy; seconds that it took."""
        began_s = time.monotonic()
        self.do("up", "--detach", "--wait", *words)
        return time.monotonic() - began_s

    def containers(self, service: str, *words: str) -> list[str]:
        """Ids of the running containers of a service; with "--all", of those that have stopped as well."""
        return self.do("ps", "--quiet", *words, service).split()

    def inspect(self, service: str, *words: str) -> list[dict[str, Any]]:
        """What the engine knows of a service's containers."""
        return list(json.loads(run("docker", "inspect", *self.containers(service, *words))))

    def address(self, service: str) -> str:
        """Where this machine reaches the first container of a service."""
        return next(iter(self.addresses(service).values()))

    def addresses(self, service: str) -> dict[str, str]:
        """Where this machine reaches the containers of a service, by their ids."""
        return {
            each["Id"]: str(each["NetworkSettings"]["Networks"][f"{PROJECT}_inside"]["IPAddress"])
            for each in self.inspect(service)
        }

    def metrics(self, service: str) -> dict[str, Reading]:
        """What containers of a service tell Prometheus, by their ids."""
        targets = {each: f"{address}:9464" for each, address in self.addresses(service).items()}
        readings = asyncio.run(scrape(targets, timeout_s=30.0))
        assert not [reading.error for reading in readings.values() if reading.error], readings
        return readings

    def num_continued(self) -> float:
        """Streams that all gateways have continued elsewhere."""
        return sum(
            each.value(names.RESUBMISSIONS, outcome="continued") for each in self.metrics("gateway").values()
        )

    def states(self) -> dict[str, list[str]]:
        """Health, or else state, of every container by its service."""
        found: dict[str, list[str]] = {}
        for line in self.do("ps", "--all", "--format", "json").splitlines():
            each = json.loads(line)
            found.setdefault(each["Service"], []).append(each["Health"] or each["State"])
        return found

    def is_healthy(self) -> bool:
        """Whether every container that serves runs, and is healthy where its image says how to ask."""
        states = self.states()
        states.pop("configure", None)
        return {state for each in states.values() for state in each} == {"healthy", "running"}

    def wait_healthy(self) -> None:
        """Returns when everything is."""
        wait_until(self.is_healthy, f"{self.states()}")

    def crash(self, service: str, under_way: Iterable[Stream] = (), container: str = "") -> None:
        """Kills the first process of one container, by default a service's first, under these streams, of
        which none may have ended; and waits until it was started again. `docker kill` would count as what
        somebody wished.
        """
        found = self.inspect(service)
        before = next((each for each in found if each["Id"] == container), found[0])
        assert not [each.ended for each in under_way if each.ended], "they ended before anything happened"
        os.kill(before["State"]["Pid"], signal.SIGKILL)

        def is_back() -> bool:
            (now,) = json.loads(run("docker", "inspect", before["Id"]))
            return bool(now["RestartCount"] > before["RestartCount"]) and self.is_healthy()

        wait_until(is_back, f"{service} did not come back")


def ask(url: str, *, key: Mapping[str, str] = KEY, model: str = MODEL, **options: Any) -> httpx.Response:
    """One short chat, streamed."""
    body = {"model": model, "stream": True, "max_tokens": 4}
    body["messages"] = [{"role": "user", "content": "Hello"}]
    with httpx.Client(trust_env=False, timeout=60, **options) as client:
        return client.post(f"{url}/v1/chat/completions", json=body, headers=dict(key))


class Stream(threading.Thread):
    """A long answer that is read while something happens to the stack."""

    def __init__(self, url: str, num_tokens: int, seed: int, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._url, self._seed, self._options = url, seed, options
        self.num_tokens = num_tokens
        self.begun = threading.Event()
        self.request_id = ""
        self.text = ""
        # Why it ended: "length" when it is whole.
        self.ended = ""
        self.start()

    def run(self) -> None:
        """Reads to the end, whichever it is."""
        body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": self.num_tokens, "stream": True}
        body |= {"ignore_eos": True, "seed": self._seed, "temperature": 0.8}
        try:
            with (
                httpx.Client(trust_env=False, timeout=LIMIT_S, **self._options) as client,
                client.stream("POST", f"{self._url}/v1/completions", json=body, headers=KEY) as answer,
            ):
                self.request_id = answer.headers.get("x-request-id", "")
                if answer.status_code != 200:
                    self.ended = f"{answer.status_code}: {answer.read().decode()}"
                for line in answer.iter_lines():
                    self._take(line)
        except httpx.HTTPError as error:
            self.ended = f"{type(error).__name__}: {error}"
        finally:
            self.begun.set()

    def _take(self, line: str) -> None:
        if not line.startswith("data: {"):
            return
        event = json.loads(line[6:])
        self.begun.set()
        if "error" in event:
            self.ended = event["error"]["message"]
        for choice in event.get("choices", ()):
            self.text += choice["text"]
            self.ended = choice["finish_reason"] or self.ended


@contextmanager
def streams(
    url: str, num: int, num_tokens: int, *, may_break: bool = False, **options: Any
) -> Iterator[list[Stream]]:
    """So many answers under way inside the block; after it they have ended, and are whole unless they
    `may_break`.
    """
    running = [Stream(url, num_tokens, seed, options) for seed in range(num)]
    for each in running:
        assert each.begun.wait(LIMIT_S)
    assert not [each.ended for each in running if each.ended], "they ended before anything happened"
    yield running
    for each in running:
        each.join(LIMIT_S)
    if not may_break:
        assert [each.ended for each in running] == ["length"] * num


def wait_traced(request_ids: Iterable[str]) -> None:
    """Returns when Jaeger has a whole trace of each request: four services' spans (Envoy, gateway, tokenizer,
    engine) under one root.
    """
    # What there is of each.
    wanted: dict[str, list[str]] = {each: [] for each in request_ids}
    with contextlib.closing(JaegerReader(JAEGER)) as reader:

        def are_whole() -> bool:
            for request_id in tuple(wanted):
                for trace_id in reader.traces_of_request(request_id):
                    spans = reader.trace(trace_id)
                    ids = {span.span_id for span in spans}
                    roots = [span for span in spans if span.parent_id not in ids]
                    if len({span.service for span in spans}) == 4 and len(roots) == 1:
                        wanted.pop(request_id, None)
                    elif request_id in wanted:
                        wanted[request_id] = [f"{span.service} {span.name}" for span in spans]
            return not wanted

        wait_until(are_whole, wanted)


def size_mb(image: str) -> float:
    """Megabytes of an image, with what it is built on."""
    return int(run("docker", "image", "inspect", "-f", "{{.Size}}", image)) / 1e6
