"""Starts every container of the manifests by its own command, and uses what runs."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deployment import kustomize
from tests.deployment.containerfile import REPOSITORY, parse
from tests.deployment.deployed import Deployment, ask, wait_http

# A small machine needs long to start every service, and nothing waits longer than the test may take.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_the_manifests_run(root: Path) -> None:
    manifests = kustomize.build(REPOSITORY / "k8s/overlays/local")
    hosts = [manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == "Service"]
    deployment = Deployment(root, hosts)
    try:
        _run_manifests(deployment, manifests)
    finally:
        deployment.close()


def _run_manifests(deployment: Deployment, manifests: list[kustomize.Manifest]) -> None:
    secrets = kustomize.find(manifests, "Secret", "millrace-secrets")
    assert secrets is not None
    folder = deployment.mount("/run/secrets/millrace", "secrets")
    (folder / "context_secret").write_text(secrets["stringData"]["context_secret"])
    deployment.mount("/var/lib/millrace/state", "state")
    deployment.mount("/etc/envoy/edge", "edge")
    redis = _container(manifests, "redis")
    words = [*redis["command"], *redis["args"], "--port", str(deployment.network.port("redis", 6379))]
    data = deployment.mount("/data", "redis")
    deployment.launch(
        "redis", [str(shutil.which(words[0])), *words[1:]], {}, data, as_user=deployment.as_user
    )
    for name in ("tokenizer", "engine", "gateway"):
        container = _container(manifests, name)
        dockerfile = f"services/{name}/Dockerfile"
        argv = [*parse(REPOSITORY / dockerfile).command("ENTRYPOINT"), *container["args"]]
        variables = _variables(manifests, container, secrets["stringData"])
        started = deployment.start(name, dockerfile, argv, variables, _writable(container))
        started.wait_for_line(f"ready {name}")
    configure = _container(manifests, "envoy", kind="initContainers")
    argv = [*configure["command"], *configure["args"]]
    variables = _variables(manifests, configure, secrets["stringData"])
    rendered = deployment.start(
        "configure", "services/gateway/Dockerfile", argv, variables, _writable(configure)
    )
    assert rendered.wait() == 0, rendered.log.read_text()
    envoy = _container(manifests, "envoy")
    command = [*envoy["command"], *envoy["args"]]
    edge = deployment.start_envoy(command, deployment.mounts["/etc/envoy/edge"] / "envoy.yaml")
    assert command[command.index("--drain-time-s") + 1] == "10"
    probe = envoy["readinessProbe"]["httpGet"]
    (port,) = [port["containerPort"] for port in envoy["ports"] if port["name"] == probe["port"]]
    wait_http(f"http://127.0.0.1:{deployment.network.port('envoy', port)}{probe['path']}")
    ask(edge)
    _drain(deployment, envoy)


def _drain(deployment: Deployment, envoy: dict[str, Any]) -> None:
    """The preStop script returns once nothing is in flight, and Envoy then takes no new connections."""
    command = envoy["lifecycle"]["preStop"]["exec"]["command"]
    assert command == ["/bin/bash", "/opt/scripts/drain.sh"]
    admin = deployment.network.port("envoy", 9901)
    script = REPOSITORY / "k8s/base/drain.sh"
    drained = subprocess.run(
        ["/bin/bash", str(script), str(admin), "30"],
        env={"PATH": "/usr/bin:/bin", "SETTLE_S": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert drained.returncode == 0, drained.stderr
    url = f"http://127.0.0.1:{deployment.network.port('envoy', 8080)}/health"
    while _answers(url):
        time.sleep(0.1)


def _answers(url: str) -> bool:
    try:
        httpx.get(url, timeout=5, trust_env=False)
    except httpx.TransportError:
        return False
    return True


def _container(manifests: list[kustomize.Manifest], name: str, kind: str = "containers") -> dict[str, Any]:
    manifest = kustomize.find(manifests, "Deployment", name) or kustomize.find(manifests, "StatefulSet", name)
    assert manifest is not None
    (container,) = manifest["spec"]["template"]["spec"][kind]
    return dict(container)


def _writable(container: dict[str, Any]) -> list[str]:
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    return [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]


def _variables(
    manifests: list[kustomize.Manifest], container: dict[str, Any], secrets: Mapping[str, str]
) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        config_map = kustomize.find(manifests, "ConfigMap", source["configMapRef"]["name"])
        assert config_map is not None
        found |= config_map["data"]
    for entry in container.get("env", ()):
        if "valueFrom" in entry:
            found[entry["name"]] = secrets[entry["valueFrom"]["secretKeyRef"]["key"]]
        else:
            found[entry["name"]] = entry["value"]
    return found
