"""Manifests against the Kubernetes schemas and against the policies that this repository sets itself."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import kubernetes_validate
import pytest
import yaml

from observability import names
from tests.deployment import custom_resources, kustomize, settings
from tests.deployment.composition import load
from tests.deployment.containerfile import REPOSITORY, parse
from tests.deployment.kustomize import Manifest, find

K8S = REPOSITORY / "k8s"
TARGETS = ("base", "overlays/local", "overlays/production")
WORKLOADS = ("Deployment", "StatefulSet")
# Kinds of operators that are not part of Kubernetes, without a schema here.
CUSTOM = {"ScaledObject"}
# Secret keys that the documentation tells people to make.
SECRET_KEYS = {"context_secret", "keys_entries", "ledger_url", "postgres_password"}


@pytest.fixture(params=TARGETS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return kustomize.build(K8S / request.param)


def _workloads(manifests: list[Manifest]) -> Iterator[tuple[str, dict[str, Any]]]:
    for manifest in manifests:
        if manifest["kind"] in WORKLOADS:
            yield manifest["metadata"]["name"], manifest["spec"]["template"]["spec"]


def _containers(manifests: list[Manifest], *, init: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, pod in _workloads(manifests):
        for container in [*(pod.get("initContainers", []) if init else []), *pod["containers"]]:
            yield f"{name}/{container['name']}", container


def _validate(manifest: Manifest) -> None:
    if manifest["kind"] in custom_resources.KINDS:
        custom_resources.validate(manifest)
    elif manifest["kind"] not in CUSTOM:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def _stage(folder: Path, *components: str) -> Path:
    """A copy of the manifests with an overlay of the base and these components; the overlay's folder."""
    staged = folder / "k8s"
    shutil.copytree(K8S, staged)
    names = [f"../components/{name}" for name in components]
    rules = {"namespace": "millrace", "resources": ["../base"], "components": names}
    (staged / "overlays/kustomization.yaml").write_text(yaml.safe_dump(rules))
    return staged / "overlays"


def test_manifests_fit_the_schemas(manifests: list[Manifest]) -> None:
    assert len(manifests) >= 20
    for manifest in manifests:
        _validate(manifest)


needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")


@needs_kubectl
@pytest.mark.parametrize("target", TARGETS)
def test_the_real_kustomize_renders_the_same(target: str) -> None:
    _compare_with_the_real(K8S / target)


@needs_kubectl
def test_the_real_kustomize_renders_the_optional_components_the_same(tmp_path: Path) -> None:
    _compare_with_the_real(_stage(tmp_path, "gpu", "mtls", "leaderworkerset", "inferencepool"))


def _compare_with_the_real(folder: Path) -> None:
    rendered = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True
    ).stdout
    # Names of generated maps end in a hash of their content.
    generated = re.compile(r"\b((?:millrace|envoy|collector|jaeger|prometheus)-[a-z]+)-[a-z0-9]{10}\b")
    theirs = {_key(each): each for each in yaml.safe_load_all(generated.sub(r"\1", rendered))}
    ours = {_key(manifest): manifest for manifest in kustomize.build(folder)}
    assert theirs.keys() == ours.keys()
    for key, manifest in ours.items():
        if manifest["kind"] != "Secret":
            assert _plain(theirs[key]) == _plain(manifest), key
    # A name that kept its place while the map got another would be found nowhere.
    full = {_key(each) for each in yaml.safe_load_all(rendered)}
    for name in re.findall(r"configMap(?:Ref)?:\s+name: (\S+)", rendered):
        assert ("ConfigMap", name) in full, name


def _key(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _plain(value: Any) -> Any:
    # Lists that are merged by key have no order that matters.
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return sorted((_plain(item) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
    return value


def test_the_copies_are_true() -> None:
    """Kustomize reads nothing outside its folder, so some files are there twice."""
    component = K8S / "components/observability"
    pairs = {
        K8S / "base/millrace.toml": "config/millrace.toml",
        component / "collector.yaml": "observability/collector/config.yaml",
        component / "jaeger.yaml": "observability/jaeger/config.yaml",
        component / "prometheus.yml": "observability/prometheus/prometheus.yml",
        component / "alerts.yml": "observability/prometheus/alerts.yml",
    }
    for copy, original in pairs.items():
        assert copy.read_text() == (REPOSITORY / original).read_text(), f"copy {original} to {copy}"


def test_pods_are_hardened(manifests: list[Manifest]) -> None:
    for name, pod in _workloads(manifests):
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
    for name, container in _containers(manifests):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name


def test_containers_have_pinned_images_and_limits(manifests: list[Manifest]) -> None:
    for name, container in _containers(manifests):
        tag = container["image"].rpartition(":")[2]
        assert re.match(r"v?\d+\.\d+", tag), f"{name}: {container['image']}"
        for kind in ("requests", "limits"):
            assert {"cpu", "memory"} <= container["resources"][kind].keys(), name


def test_containers_have_all_three_probes(manifests: list[Manifest]) -> None:
    for name, container in _containers(manifests, init=False):
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


def test_images_are_those_of_compose(manifests: list[Manifest]) -> None:
    known = {service["image"] for service in load()["services"].values()}
    known |= {
        service["image"] for service in load("docker-compose.yml", "compose.gpu.yml")["services"].values()
    }
    for name, container in _containers(manifests):
        assert container["image"] in known or container["image"].startswith("postgres:"), name


def test_what_is_mounted_and_read_exists(manifests: list[Manifest]) -> None:
    for name, pod in _workloads(manifests):
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


def _environment(manifests: list[Manifest], container: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        config_map = find(manifests, "ConfigMap", source["configMapRef"]["name"])
        assert config_map is not None
        found |= config_map["data"]
    for entry in container.get("env", ()):
        found[entry["name"]] = entry.get("value", "")
    if "MILLRACE_KEYS__ENTRIES" in found:
        found["MILLRACE_KEYS__ENTRIES"] = "[]"
    return found


def test_variables_are_those_that_the_services_know(manifests: list[Manifest]) -> None:
    dockerfiles = {"gateway": "gateway", "tokenizer": "tokenizer", "engine": "engine"}
    for _, container in _containers(manifests):
        match = re.match(r"millrace/(\w+):", container["image"])
        if match:
            image = parse(REPOSITORY / "services" / dockerfiles[match[1]] / "Dockerfile").environment()
            environment = {**image, **_environment(manifests, container)}
            settings.accept(REPOSITORY / "config/millrace.toml", environment)


def test_addresses_between_services_lead_to_ports_that_are_open(manifests: list[Manifest]) -> None:
    services = {
        (manifest["metadata"]["name"], str(port["port"]))
        for manifest in manifests
        if manifest["kind"] == "Service"
        for port in manifest["spec"]["ports"]
    }
    for name, container in _containers(manifests):
        for variable, value in _environment(manifests, container).items():
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
    deny = find(manifests, "NetworkPolicy", "deny-all")
    assert deny is not None
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
        pod = dict(_workloads(manifests))[name]
        (container,) = pod["containers"]
        environment = _environment(manifests, container)
        drain = float(environment[f"MILLRACE_{name.upper()}__DRAIN_LIMIT_S"])
        settle = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["terminationGracePeriodSeconds"] > drain + settle, name
    envoy = dict(_workloads(manifests))["envoy"]
    script = (K8S / "base/drain.sh").read_text()
    (limit,) = re.findall(r"limit_s=\$\{2:-(\d+)\}", script)
    assert envoy["terminationGracePeriodSeconds"] > int(limit)


def test_disruption_budgets_and_spread_cover_what_serves(manifests: list[Manifest]) -> None:
    for name in ("envoy", "gateway", "tokenizer", "engine"):
        budget = find(manifests, "PodDisruptionBudget", name)
        assert budget is not None
        assert budget["spec"]["selector"]["matchLabels"] == {"app.kubernetes.io/name": name}
        assert dict(_workloads(manifests))[name]["topologySpreadConstraints"], name


def test_autoscaling_asks_for_metrics_that_exist() -> None:
    manifests = kustomize.build(K8S / "overlays/production")
    scaled = find(manifests, "ScaledObject", "engine")
    assert scaled is not None
    for trigger in scaled["spec"]["triggers"]:
        (metric,) = re.findall(r"millrace_\w+", trigger["metadata"]["query"])
        assert metric in names.METRICS
        assert trigger["metadata"]["serverAddress"] == "http://prometheus:9090"
    for manifest in manifests:
        if manifest["kind"] in {"HorizontalPodAutoscaler", "ScaledObject"}:
            reference = manifest["spec"]["scaleTargetRef"]
            assert find(manifests, reference["kind"], reference["name"])


@pytest.mark.parametrize("component", sorted(folder.name for folder in (K8S / "components").iterdir()))
def test_components_can_be_added_one_by_one(tmp_path: Path, component: str) -> None:
    for manifest in kustomize.build(_stage(tmp_path, component)):
        _validate(manifest)


@pytest.mark.parametrize("others", [(), ("cpu",), ("gpu",), ("gpu", "mtls")])
def test_a_group_of_engines_is_the_stateful_set_s_pod(tmp_path: Path, others: tuple[str, ...]) -> None:
    manifests = kustomize.build(_stage(tmp_path, *others, "leaderworkerset"))
    group = find(manifests, "LeaderWorkerSet", "engine-group")
    engine = find(manifests, "StatefulSet", "engine")
    assert group is not None
    assert engine is not None
    assert engine["spec"]["replicas"] == 0, "the engines would be there twice"
    assert group["spec"]["leaderWorkerTemplate"]["workerTemplate"] == engine["spec"]["template"]
    # An engine does not span pods: every further pod would be found as an engine of its own.
    assert group["spec"]["leaderWorkerTemplate"]["size"] == 1


def test_an_inference_pool_s_pods_take_its_requests(tmp_path: Path) -> None:
    manifests = kustomize.build(_stage(tmp_path, "inferencepool"))
    pool = find(manifests, "InferencePool", "millrace")
    assert pool is not None
    name = pool["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"]
    (target,) = pool["spec"]["targetPorts"]
    open_ports = {port["containerPort"] for port in dict(_containers(manifests))[f"{name}/{name}"]["ports"]}
    assert target["number"] in open_ports
    policy = find(manifests, "NetworkPolicy", name)
    assert policy is not None
    assert {"ports": [{"protocol": "TCP", "port": target["number"]}]} in policy["spec"]["ingress"]
    picker = find(manifests, "NetworkPolicy", "endpoint-picker")
    assert picker is not None
    reference = pool["spec"]["endpointPickerRef"]
    assert picker["spec"]["podSelector"]["matchLabels"] == {"inferencepool": reference["name"]}
    assert picker["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": reference["port"]["number"]}]


def test_the_names_told_to_an_endpoint_picker_are_those_of_the_metrics() -> None:
    text = (K8S / "components/inferencepool/kustomization.yaml").read_text()
    told = set(re.findall(r"-metric: (\w+)$", text, re.MULTILINE))
    assert told == {metric.name for metric in names.INFERENCE_EXTENSION.values()}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("InferencePool", {"targetPorts": []}),
        ("InferencePool", {"targetPorts": [{"number": 70000}]}),
        ("InferencePool", {"endpointPickerRef": {"name": "picker"}}),
        ("InferencePool", {"extensionRef": {"name": "picker"}}),
        ("LeaderWorkerSet", {"startupPolicy": "Together"}),
        ("LeaderWorkerSet", {"leaderWorkerTemplate": {"size": 1}}),
    ],
)
def test_the_schemas_of_other_kinds_refuse(tmp_path: Path, kind: str, change: dict[str, Any]) -> None:
    manifests = kustomize.build(_stage(tmp_path, "leaderworkerset", "inferencepool"))
    (manifest,) = [each for each in manifests if each["kind"] == kind]
    custom_resources.validate(manifest)
    with pytest.raises(jsonschema_rs.ValidationError):
        custom_resources.validate({**manifest, "spec": {**manifest["spec"], **change}})


def test_mutual_tls_reaches_everything_that_speaks_inside(tmp_path: Path) -> None:
    manifests = kustomize.build(_stage(tmp_path, "mtls", "tls"))
    for name, pod in _workloads(manifests):
        secrets = {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
        assert "millrace-internal-tls" in secrets, name
        configured = [
            container
            for container in [*pod.get("initContainers", ()), *pod["containers"]]
            if container["image"].startswith("millrace/")
        ]
        for container in configured:
            variables = _environment(manifests, container)
            image = parse(REPOSITORY / "services" / container["image"][9:].split(":")[0] / "Dockerfile")
            settings.accept(REPOSITORY / "config/millrace.toml", {**image.environment(), **variables})
            files = {
                variables[f"MILLRACE_SECURITY__TLS_{key}"] for key in ("CERTIFICATE", "KEY", "AUTHORITY")
            }
            assert {file.rpartition("/")[0] for file in files} == {"/etc/millrace-tls"}
        mounted = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
        assert "/etc/millrace-tls" in mounted, name
        # The kubelet's gRPC probes would be refused.
        for kind in ("startup", "readiness", "liveness"):
            probe = pod["containers"][0][f"{kind}Probe"]
            assert "grpc" not in probe
            if name != "envoy":
                command = probe["exec"]["command"]
                assert command[:3] == ["python", "-m", "services.healthcheck"]
                assert int(command[3].rpartition(":")[2]) in {
                    port["containerPort"] for port in pod["containers"][0]["ports"]
                }
