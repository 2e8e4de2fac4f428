"""Starts every container of the manifests by its own command, and uses what runs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deployment import kustomize
from tests.deployment.containerfile import REPOSITORY, parse
from tests.deployment.deployed import Deployment, ask, wait_http
from tests.deployment.manifests import K8S, stage

# A small machine needs long to start every service, and nothing waits longer than the test may take.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_one_gateway_serves_two_models_of_the_manifests(root: Path, tmp_path: Path) -> None:
    manifests = kustomize.build(stage(tmp_path, "redis", "second-model"))
    known = kustomize.find(kustomize.build(K8S / "overlays/local"), "Secret", "millrace-secrets")
    assert known is not None
    engines = ("engine", "engine-second")
    deployment = Deployment(root, [*_hosts(manifests), *engines])
    # There are no records of a name here: the engines that it finds in a cluster are listed.
    found = {"MILLRACE_GATEWAY__DISCOVERY": "static"}
    found["MILLRACE_GATEWAY__ENGINES"] = '["engine:50071", "engine-second:50071"]'
    try:
        _start_services(deployment, [*manifests, known], engines, found)
        port = _start_edge(deployment, [*manifests, known])
        for model in ("millrace-nano", "millrace-nano-draft"):
            ask(port, model)
        for name in engines:
            # Each was asked, and by the queries of `second-model/autoscale` it is known what it serves.
            (build,) = _series(deployment, name, "millrace_build_info")
            assert (
                f'model="{_variables(manifests, _container(manifests, name), {})["MILLRACE_MODEL__NAME"]}"'
                in build
            )
            assert len(_series(deployment, name, "millrace_engine_requests_waiting")) == 1
    finally:
        deployment.close()


def _hosts(manifests: list[kustomize.Manifest]) -> list[str]:
    return [manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == "Service"]


def _series(deployment: Deployment, name: str, metric: str) -> list[str]:
    page = httpx.get(f"http://127.0.0.1:{deployment.network.port(name, 9464)}/metrics", trust_env=False).text
    return [line for line in page.splitlines() if re.match(rf"{metric}[{{ ]", line)]


def _start_services(
    deployment: Deployment,
    manifests: list[kustomize.Manifest],
    engines: Sequence[str],
    found: Mapping[str, str],
) -> None:
    """Everything but Envoy; `found` are variables of the gateway that take the place of the manifest's."""
    secrets = kustomize.find(manifests, "Secret", "millrace-secrets")
    config = kustomize.find(manifests, "ConfigMap", "millrace-config")
    assert secrets is not None
    assert config is not None
    (deployment.mount("/etc/millrace", "config") / "millrace.toml").write_text(
        config["data"]["millrace.toml"]
    )
    folder = deployment.mount("/run/secrets/millrace", "secrets")
    (folder / "context_secret").write_text(secrets["stringData"]["context_secret"])
    deployment.mount("/var/lib/millrace/state", "state")
    deployment.mount("/etc/envoy/edge", "edge")
    redis = _container(manifests, "redis")
    assert redis["command"] == ["valkey-server"], "Redis stands in for it here"
    known = _variables(manifests, redis, secrets["stringData"])
    words = [_expanded(word, known) for word in redis["args"]]
    words = [str(shutil.which("redis-server")), *words, "--port", str(deployment.network.port("redis", 6379))]
    data = deployment.mount("/data", "redis")
    deployment.launch("redis", words, {}, data, as_user=deployment.as_user)
    for name in ("tokenizer", *engines, "gateway"):
        container = _container(manifests, name)
        kind = "engine" if name in engines else name
        dockerfile = f"services/{kind}/Dockerfile"
        argv = [*parse(REPOSITORY / dockerfile).command("ENTRYPOINT"), *container["args"]]
        variables = _variables(manifests, container, secrets["stringData"])
        variables |= found if name == "gateway" else {}
        started = deployment.start(name, dockerfile, argv, variables, _writable(container))
        started.wait_for_line(f"ready {kind}")


def _start_edge(deployment: Deployment, manifests: list[kustomize.Manifest]) -> int:
    """Renders Envoy's configuration and starts it; the port that stands for 8080."""
    secrets = kustomize.find(manifests, "Secret", "millrace-secrets")
    assert secrets is not None
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
    return edge


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
            found[entry["name"]] = _expanded(entry["value"], found)
    return found


def _expanded(text: str, known: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: known[match[1]], text)
