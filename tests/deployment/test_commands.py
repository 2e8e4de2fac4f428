"""Starts every container of the compose file by its own command, and uses what runs."""

from __future__ import annotations

import errno
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deployment.composition import environment, load
from tests.deployment.containerfile import REPOSITORY, parse
from tests.deployment.deployed import Deployment, ask, wait_http
from tests.deployment.runtime import (
    Container,
    can_confine,
    give_to_user,
)

# A small machine needs long to start every service, and nothing waits longer than the test may take.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def composed(root: Path) -> Iterator[tuple[Deployment, dict[str, Any]]]:
    compose = load()
    deployment = Deployment(root, list(compose["services"]))
    yield deployment, compose["services"]
    deployment.close()


def _dockerfile(services: dict[str, Any], name: str) -> str:
    build = services[name].get("build") or services["configure"]["build"]
    return str(build["dockerfile"])


def _start_composed(deployment: Deployment, services: dict[str, Any], name: str) -> Container:
    service, dockerfile = services[name], _dockerfile(services, name)
    parsed = parse(REPOSITORY / dockerfile)
    argv = [*service.get("entrypoint", parsed.command("ENTRYPOINT"))]
    argv += service.get("command", parsed.command("CMD"))
    assert service["read_only"] is True
    writable = [entry.partition(":")[0] for entry in service["tmpfs"]]
    writable += [volume.split(":")[1] for volume in service.get("volumes", ()) if not volume.endswith(":ro")]
    return deployment.start(name, dockerfile, argv, environment(service), writable)


def _slash_to_colon(word: str) -> str:
    return re.sub(r"/dev/tcp/([\d.]+)/(\d+)", r"/dev/tcp/ \1:\2", word)


def _colon_to_slash(word: str) -> str:
    return re.sub(r"/dev/tcp/ ([\d.]+):(\d+)", r"/dev/tcp/\1/\2", word)


def test_the_compose_file_runs(composed: tuple[Deployment, dict[str, Any]]) -> None:
    deployment, services = composed
    for name in ("secrets", "edge", "state"):
        deployment.mount(f"/var/lib/millrace/{name}", name)
    port = deployment.network.port("redis", 6379)
    data = deployment.mount("/data", "redis")
    program, *words = services["redis"]["command"]
    assert program == "valkey-server", "Redis stands in for it here"
    words = [str(shutil.which("redis-server")), *words, "--port", str(port), "--bind", "127.0.0.1"]
    deployment.launch("redis", words, {}, data, as_user=deployment.as_user)

    configure = _start_composed(deployment, services, "configure")
    assert configure.wait() == 0, configure.log.read_text()
    secret = deployment.mounts["/var/lib/millrace/secrets"] / "context_secret"
    first = secret.read_text()
    assert len(first.strip()) == 64
    assert secret.stat().st_mode & 0o077 == 0
    assert _start_composed(deployment, services, "configure").wait() == 0
    assert secret.read_text() == first, "a second run keeps the secret"

    for name in ("tokenizer", "engine"):
        _start_composed(deployment, services, name)
    for name in ("tokenizer", "engine"):
        deployment.running[name].wait_for_line(f"ready {name}")
        deployment.check_health(name, _dockerfile(services, name))
    _start_composed(deployment, services, "gateway").wait_for_line("ready gateway")
    deployment.check_health("gateway", _dockerfile(services, "gateway"))

    command = [*services["envoy"]["entrypoint"], *services["envoy"]["command"]]
    edge = deployment.start_envoy(command, deployment.mounts["/var/lib/millrace/edge"] / "envoy.yaml")
    wait_http(f"http://127.0.0.1:{deployment.network.port('envoy', 9902)}/ready")
    health = services["envoy"]["healthcheck"]["test"]
    words = [deployment.network.translate(_slash_to_colon(word), "envoy") for word in health[1:]]
    checked = subprocess.run([_colon_to_slash(word) for word in words], capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    ask(edge)
    for name in ("gateway", "tokenizer", "engine"):
        address = f"http://127.0.0.1:{deployment.network.port(name, 9464)}/metrics"
        with urllib.request.urlopen(address, timeout=10) as response:
            assert b"millrace_" in response.read(), name
    for name in ("gateway", "engine", "tokenizer"):
        assert deployment.running[name].terminate() == 0, name


@pytest.mark.skipif(not can_confine(), reason="needs the right to mount")
def test_nothing_but_declared_paths_can_be_written_to(root: Path) -> None:
    deployment = Deployment(root, [])
    try:
        state = deployment.mount("/var/lib/millrace/state", "state")
        deployment.mount("/var/lib/millrace/secrets", "secrets")
        image = deployment.image("services/tokenizer/Dockerfile")
        # Writable by its owner, so that only the file system can refuse.
        for folder in (image.root / "app", image.root / "etc/millrace"):
            give_to_user(folder, as_user=True)
        tries = ["/tmp", "/var/lib/millrace/state", "/var/lib/millrace/secrets", "/app", "/etc/millrace"]
        script = "import pathlib, sys\n" + "\n".join(
            [
                "for folder in sys.argv[1:]:",
                "    try:",
                "        (pathlib.Path(folder) / 'written').write_text('')",
                "    except OSError as error:",
                "        print(folder, error.errno)",
            ]
        )
        argv = ["python", "-c", script, *tries, "/var/tmp", "/usr"]
        container = deployment.start(
            "probe", "services/tokenizer/Dockerfile", argv, {}, ["/tmp", "/var/lib/millrace/state"]
        )
        assert container.wait() == 0, container.log.read_text()
        refused = [line.split() for line in container.log.read_text().splitlines()]
        expected = [deployment.mounts["/var/lib/millrace/secrets"], image.root / "app"]
        expected += [image.root / "etc/millrace", Path("/var/tmp"), Path("/usr")]
        assert refused == [[str(path), str(errno.EROFS)] for path in expected]
        assert (state / "written").exists()
        assert (root / "scratch/probe/written").exists()
        assert not Path("/tmp/written").exists()
    finally:
        deployment.close()


def test_the_span_store_writes_where_it_is_told(root: Path) -> None:
    """No image of its own starts it, yet its files are in every image of ours."""
    deployment = Deployment(root, ["collector"])
    try:
        state = deployment.mount("/var/lib/millrace/state", "state")
        variables = {
            "MILLRACE_OBSERVABILITY__STORE": "/var/lib/millrace/state/spans.sqlite",
            "MILLRACE_OBSERVABILITY__LISTEN": "0.0.0.0:4317",
            "MILLRACE_OBSERVABILITY__METRICS_LISTEN": "0.0.0.0:9464",
        }
        container = deployment.start(
            "collector",
            "services/tokenizer/Dockerfile",
            ["python", "-m", "observability"],
            variables,
            ["/tmp", "/var/lib/millrace/state"],
        )
        container.wait_for_line("ready observability")
        assert container.terminate() == 0, container.log.read_text()
        assert (state / "spans.sqlite").stat().st_size > 0
    finally:
        deployment.close()
