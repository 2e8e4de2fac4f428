"""Manifests against the policies that this repository sets itself."""

from __future__ import annotations

import re

from runtime.server import LIVE
from tests.deployment import settings
from tests.deployment.composition import load
from tests.deployment.containerfile import REPOSITORY, parse
from tests.deployment.kustomize import Manifest, find, the
from tests.deployment.manifests import (
    K8S,
    WORKLOADS,
    containers,
    variables_of,
    workloads,
)

# Secret keys that the documentation tells people to make.
SECRET_KEYS = {
    *("context_secret", "keys_entries", "ledger_url", "limits_password", "postgres_password"),
    "rollout_api_key",
}


def test_pods_are_hardened(manifests: list[Manifest]) -> None:
    for name, pod in workloads(manifests):
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True, name
        assert security["runAsUser"] > 0, name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["serviceAccountName"] == name
        assert find(manifests, "ServiceAccount", name), name
        for forbidden in ("hostNetwork", "hostPID", "hostIPC"):
            assert forbidden not in pod, name
        assert not [volume for volume in pod.get("volumes", ()) if "hostPath" in volume], name
    for name, container in containers(manifests):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name


def test_containers_have_pinned_images_and_limits(manifests: list[Manifest]) -> None:
    for name, container in containers(manifests):
        tag = container["image"].rpartition(":")[2]
        assert re.match(r"v?\d+\.\d+", tag), f"{name}: {container['image']}"
        for kind in ("requests", "limits"):
            assert {"cpu", "memory"} <= container["resources"][kind].keys(), name


def test_containers_have_all_three_probes(manifests: list[Manifest]) -> None:
    for name, container in containers(manifests, init=False):
        ports = {str(port["containerPort"]) for port in container["ports"]}
        ports |= {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            check = container[probe]
            for kind in ("grpc", "httpGet", "tcpSocket"):
                if kind in check:
                    assert str(check[kind]["port"]) in ports, f"{name} {probe}"
        if container["image"].startswith("millrace/"):
            assert all(
                "grpc" in container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")
            ), name


def test_a_gateway_that_waits_for_its_engines_is_not_restarted(manifests: list[Manifest]) -> None:
    (container,) = dict(workloads(manifests))["gateway"]["containers"]
    for kind in ("startup", "liveness"):
        assert container[f"{kind}Probe"]["grpc"] == {"port": 50051, "service": LIVE}, kind
    assert container["readinessProbe"]["grpc"] == {"port": 50051}


def test_images_are_those_of_compose(manifests: list[Manifest]) -> None:
    known = {service["image"] for service in load()["services"].values()}
    known |= {
        service["image"] for service in load("docker-compose.yml", "compose.gpu.yml")["services"].values()
    }
    for name, container in containers(manifests):
        assert container["image"] in known or container["image"].startswith("postgres:"), name


def test_what_is_mounted_and_read_exists(manifests: list[Manifest]) -> None:
    for name, pod in workloads(manifests):
        claims = {
            claim["metadata"]["name"]
            for manifest in manifests
            if manifest["kind"] == "StatefulSet" and manifest["metadata"]["name"] == name
            for claim in manifest["spec"].get("volumeClaimTemplates", ())
        }
        volumes = {volume["name"] for volume in pod.get("volumes", ())} | claims
        for volume in pod.get("volumes", ()):
            if "configMap" in volume:
                assert find(manifests, "ConfigMap", volume["configMap"]["name"]), f"{name}: {volume}"
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert find(manifests, "PersistentVolumeClaim", claim), f"{name}: {volume}"
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes, name
            for source in container.get("envFrom", ()):
                assert find(manifests, "ConfigMap", source["configMapRef"]["name"]), name
            for entry in container.get("env", ()):
                if "valueFrom" in entry:
                    reference = entry["valueFrom"]["secretKeyRef"]
                    assert reference["name"] == "millrace-secrets"
                    assert reference["key"] in SECRET_KEYS


def test_the_instructions_make_every_secret_key() -> None:
    production = (K8S / "overlays/production/kustomization.yaml").read_text()
    used = set(
        re.findall(r"millrace-secrets, key: (\w+)", "".join(p.read_text() for p in K8S.rglob("*.yaml")))
    )
    for key in used | {"context_secret"}:
        assert f"--from-literal={key}=" in production, key
        assert key in SECRET_KEYS


def test_variables_are_those_that_the_services_know(manifests: list[Manifest]) -> None:
    dockerfiles = {"gateway": "gateway", "tokenizer": "tokenizer", "engine": "engine"}
    for _, container in containers(manifests):
        match = re.match(r"millrace/(\w+):", container["image"])
        if match:
            image = parse(REPOSITORY / "services" / dockerfiles[match[1]] / "Dockerfile").environment()
            environment = {**image, **variables_of(manifests, container)}
            settings.accept(REPOSITORY / "config/millrace.toml", environment)


def test_addresses_between_services_lead_to_ports_that_are_open(manifests: list[Manifest]) -> None:
    services = {
        (manifest["metadata"]["name"], str(port["port"]))
        for manifest in manifests
        if manifest["kind"] == "Service"
        for port in manifest["spec"]["ports"]
    }
    for name, container in containers(manifests):
        for variable, value in variables_of(manifests, container).items():
            for host, port in re.findall(r"(?<![.\d])\b([a-z][a-z-]+):(\d{4,5})\b", value):
                assert (host, port) in services, f"{name}: {variable}={value}"


def test_services_select_pods_and_their_ports(manifests: list[Manifest]) -> None:
    pods = {
        manifest["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"]: manifest["spec"][
            "template"
        ]["spec"]
        for manifest in manifests
        if manifest["kind"] in WORKLOADS
    }
    for manifest in manifests:
        if manifest["kind"] == "Service":
            pod = pods[manifest["spec"]["selector"]["app.kubernetes.io/name"]]
            ports = {port["name"] for container in pod["containers"] for port in container["ports"]}
            assert {port["targetPort"] for port in manifest["spec"]["ports"]} <= ports, manifest["metadata"][
                "name"
            ]


def test_the_network_is_closed_except_for_what_is_named(manifests: list[Manifest]) -> None:
    deny = the(manifests, "NetworkPolicy", "deny-all")
    assert deny["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    entrances = [
        manifest["metadata"]["name"]
        for manifest in manifests
        if manifest["kind"] == "NetworkPolicy"
        for rule in manifest["spec"].get("ingress", ())
        if "from" not in rule
    ]
    assert entrances == ["envoy"], "only Envoy may be reached by everybody"


def test_a_pod_outlives_its_streams(manifests: list[Manifest]) -> None:
    for name in ("gateway", "engine"):
        pod = dict(workloads(manifests))[name]
        (container,) = pod["containers"]
        environment = variables_of(manifests, container)
        drain = float(environment[f"MILLRACE_{name.upper()}__DRAIN_LIMIT_S"])
        settle = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["terminationGracePeriodSeconds"] > drain + settle, name
    envoy = dict(workloads(manifests))["envoy"]
    (container,) = envoy["containers"]
    assert container["command"][:2] == ["/bin/bash", "/opt/scripts/envoy.sh"], "Envoy alone would not drain"
    script = (K8S / "base/envoy.sh").read_text()
    (limit,) = re.findall(r"limit_s=\$\{DRAIN_LIMIT_S:-(\d+)\}", script)
    assert envoy["terminationGracePeriodSeconds"] > int(limit)


def test_disruption_budgets_and_spread_cover_what_serves(manifests: list[Manifest]) -> None:
    for name in ("envoy", "gateway", "tokenizer", "engine"):
        budget = the(manifests, "PodDisruptionBudget", name)
        assert budget["spec"]["selector"]["matchLabels"] == {"app.kubernetes.io/name": name}
        assert dict(workloads(manifests))[name]["topologySpreadConstraints"], name
