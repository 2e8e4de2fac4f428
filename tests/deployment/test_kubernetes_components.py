"""Components that are added to the base: autoscaling, groups of engines, inference pools, mutual TLS."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from observability.emit import names
from tests.deployment import custom_resources, kustomize, settings
from tests.deployment.containerfile import REPOSITORY, parse
from tests.deployment.kustomize import find, the
from tests.deployment.manifests import (
    K8S,
    containers,
    stage,
    validate,
    variables_of,
    workloads,
)


def test_autoscaling_asks_for_metrics_that_exist() -> None:
    manifests = kustomize.build(K8S / "overlays/production")
    scaled = the(manifests, "ScaledObject", "engine")
    for trigger in scaled["spec"]["triggers"]:
        (metric,) = re.findall(r"millrace_\w+", trigger["metadata"]["query"])
        assert metric in names.METRICS
        assert trigger["metadata"]["serverAddress"] == "http://prometheus:9090"
    for manifest in manifests:
        if manifest["kind"] in {"HorizontalPodAutoscaler", "ScaledObject"}:
            reference = manifest["spec"]["scaleTargetRef"]
            assert find(manifests, reference["kind"], reference["name"])


def test_engines_are_scaled_by_what_gateways_want(tmp_path: Path) -> None:
    manifests = kustomize.build(stage(tmp_path, "observability", "autoscale", "autoscale/goodput"))
    scaled = the(manifests, "ScaledObject", "engine")["spec"]
    (trigger,) = scaled["triggers"]
    assert trigger["metadata"]["query"] == f"sum({names.ENGINES_WANTED.name})"
    assert (trigger["metadata"]["threshold"], scaled["minReplicaCount"]) == ("1", 0)
    pod = the(manifests, "Deployment", "gateway")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # A gateway that nobody reaches without an engine would never want one.
    assert variables_of(manifests, container)["MILLRACE_GATEWAY__AUTOSCALING__FROM_ZERO"] == "true"


@pytest.mark.parametrize("component", sorted(folder.name for folder in (K8S / "components").iterdir()))
def test_components_can_be_added_one_by_one(tmp_path: Path, component: str) -> None:
    for manifest in kustomize.build(stage(tmp_path, component)):
        validate(manifest)


@pytest.mark.parametrize("others", [(), ("cpu",), ("gpu",), ("gpu", "mtls")])
def test_a_group_of_engines_is_the_stateful_set_s_pod(tmp_path: Path, others: tuple[str, ...]) -> None:
    manifests = kustomize.build(stage(tmp_path, *others, "leaderworkerset"))
    group = the(manifests, "LeaderWorkerSet", "engine-group")
    engine = the(manifests, "StatefulSet", "engine")
    assert engine["spec"]["replicas"] == 0, "the engines would be there twice"
    assert group["spec"]["leaderWorkerTemplate"]["workerTemplate"] == engine["spec"]["template"]
    # An engine does not span pods: every further pod would be found as an engine of its own.
    assert group["spec"]["leaderWorkerTemplate"]["size"] == 1


@pytest.mark.parametrize("others", [("gpu",), ("gpu", "mtls")])
def test_an_engine_of_several_machines_is_one_that_gateways_find(
    tmp_path: Path, others: tuple[str, ...]
) -> None:
    manifests = kustomize.build(stage(tmp_path, *others, "vllm"))
    group = the(manifests, "LeaderWorkerSet", "engine-vllm")
    engine = the(manifests, "StatefulSet", "engine")
    service = the(manifests, "Service", "engine")
    assert engine["spec"]["replicas"] == 0, "the engines would be there twice"
    template = group["spec"]["leaderWorkerTemplate"]
    leader, worker = template["leaderTemplate"], template["workerTemplate"]
    assert leader == engine["spec"]["template"]
    selector = service["spec"]["selector"].items()
    assert selector <= leader["metadata"]["labels"].items()
    assert not selector <= worker["metadata"]["labels"].items(), "a rank is no engine"
    (container,) = leader["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    settings = "MILLRACE_ENGINE__VLLM__{}_PARALLEL_SIZE"
    ranks = [int(variables[settings.format(name)] or 0) for name in ("TENSOR", "PIPELINE")]
    gpus = [int(each["resources"]["limits"]["nvidia.com/gpu"])
            for each in (container, worker["spec"]["containers"][0])]  # fmt: skip
    assert ranks[0] * ranks[1] == gpus[0] + (template["size"] - 1) * gpus[1]
    policy = the(manifests, "NetworkPolicy", "engine-vllm")
    chosen = policy["spec"]["podSelector"]["matchLabels"].items()
    assert all(chosen <= each["metadata"]["labels"].items() for each in (leader, worker))
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        # With certificates they are asked another way, as of any engine.
        assert container[probe].keys() & {"grpc", "exec"}


def test_an_inference_pool_s_pods_take_its_requests(tmp_path: Path) -> None:
    manifests = kustomize.build(stage(tmp_path, "inferencepool"))
    pool = the(manifests, "InferencePool", "millrace")
    name = pool["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"]
    (target,) = pool["spec"]["targetPorts"]
    open_ports = {port["containerPort"] for port in dict(containers(manifests))[f"{name}/{name}"]["ports"]}
    assert target["number"] in open_ports
    policy = the(manifests, "NetworkPolicy", name)
    assert {"ports": [{"protocol": "TCP", "port": target["number"]}]} in policy["spec"]["ingress"]
    picker = the(manifests, "NetworkPolicy", "endpoint-picker")
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
    manifests = kustomize.build(stage(tmp_path, "leaderworkerset", "inferencepool"))
    (manifest,) = [each for each in manifests if each["kind"] == kind]
    custom_resources.validate(manifest)
    with pytest.raises(jsonschema_rs.ValidationError):
        custom_resources.validate({**manifest, "spec": {**manifest["spec"], **change}})


def test_the_operator_s_prometheus_reads_every_pod_of_ours(tmp_path: Path) -> None:
    manifests = kustomize.build(stage(tmp_path, "monitors"))
    monitor = the(manifests, "PodMonitor", "millrace")
    (rule,) = monitor["spec"]["selector"]["matchExpressions"]
    assert set(rule["values"]) == {name for name, _ in workloads(manifests)}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for name, container in containers(manifests, init=False):
        assert endpoint["port"] in {port["name"] for port in container["ports"]}, name
    # Prometheus of compose has the same job for each.
    scraped = yaml.safe_load((REPOSITORY / "observability/prometheus/prometheus.yml").read_text())
    assert set(rule["values"]) <= {job["job_name"] for job in scraped["scrape_configs"]}


def test_mutual_tls_reaches_everything_that_speaks_inside(tmp_path: Path) -> None:
    manifests = kustomize.build(stage(tmp_path, "mtls", "tls"))
    for name, pod in workloads(manifests):
        secrets = {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
        assert "millrace-internal-tls" in secrets, name
        configured = [
            container
            for container in [*pod.get("initContainers", ()), *pod["containers"]]
            if container["image"].startswith("millrace/")
        ]
        for container in configured:
            variables = variables_of(manifests, container)
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
                assert command[:3] == ["python", "-m", "runtime.healthcheck"]
                assert int(command[3].rpartition(":")[2]) in {
                    port["containerPort"] for port in pod["containers"][0]["ports"]
                }
