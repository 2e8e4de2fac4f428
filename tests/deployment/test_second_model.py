"""Engines of a second model, in Kubernetes and in compose, behind the gateways of the first."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from observability.emit import names
from runtime.config import ModelConfig, read_tables
from runtime.models import load_models, own_model
from tests.deployment import kustomize, settings
from tests.deployment.composition import environment, load
from tests.deployment.containerfile import REPOSITORY, parse
from tests.deployment.kustomize import Manifest, find, the
from tests.deployment.manifests import K8S, containers, stage, validate, variables_of

CONFIG = K8S / "components/second-model/millrace.toml"
SETS = ("engine", "engine-second")
# Variables that give an engine its model.
TOLD = {"MILLRACE_MODEL__NAME", "MILLRACE_MODEL__PATH"}


def _engines(manifests: list[Manifest]) -> list[dict[str, Any]]:
    return [the(manifests, "StatefulSet", name) for name in SETS]


def _served(variables: dict[str, str]) -> ModelConfig:
    """What an engine with these variables serves."""
    settings.accept(CONFIG, variables)
    return own_model(read_tables(CONFIG, variables))


def test_only_the_models_differ_from_the_file_of_the_base() -> None:
    original = (REPOSITORY / "config/millrace.toml").read_text()
    models = re.compile(
        r"^(?:\[model\]|# The file of the base).*?(?=^\[supervisor\])", re.MULTILINE | re.DOTALL
    )
    assert models.sub("", CONFIG.read_text()) == models.sub("", original)
    assert models.sub("", original) != original
    assert len(load_models(read_tables(CONFIG, {})).models) == 2


@pytest.mark.parametrize("others", [(), ("cpu",), ("gpu",), ("gpu", "mtls")])
def test_each_set_of_engines_serves_its_own_model_in_pods_that_are_alike(
    tmp_path: Path, others: tuple[str, ...]
) -> None:
    manifests = kustomize.build(stage(tmp_path, *others, "second-model"))
    for manifest in manifests:
        validate(manifest)
    config = the(manifests, "ConfigMap", "millrace-config")
    assert config["data"]["millrace.toml"] == CONFIG.read_text()
    pods = [each["spec"]["template"] for each in _engines(manifests)]
    served = []
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        served.append(_served(variables_of(manifests, container)))
        container["env"] = [each for each in container["env"] if each["name"] not in TOLD]
    assert served == list(load_models(read_tables(CONFIG, {})).models.values())
    assert pods[0]["spec"] == pods[1]["spec"]
    # With the path that `gpu` gives gateways and tokenizers, too, they know both.
    for name, container in containers(manifests):
        if container["image"].startswith("millrace/"):
            tables = read_tables(CONFIG, variables_of(manifests, container))
            assert list(load_models(tables).models) == [each.name for each in served], name


def test_gateways_find_the_engines_of_both_and_neither_set_takes_the_other_s_pods(tmp_path: Path) -> None:
    manifests = kustomize.build(stage(tmp_path, "second-model"))
    service = the(manifests, "Service", "engine")
    gateway = dict(containers(manifests))["gateway/gateway"]
    assert variables_of(manifests, gateway)["MILLRACE_GATEWAY__DISCOVERY"] == "dns:engine:50071"
    engines = _engines(manifests)
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in engines]
    for number, each in enumerate(engines):
        assert each["spec"]["serviceName"] == "engine"
        # Policies of the network, disruption budgets and monitors choose by the same label.
        assert service["spec"]["selector"].items() <= labels[number].items()
        chosen = each["spec"]["selector"]["matchLabels"].items()
        assert chosen <= labels[number].items()
        assert not chosen <= labels[1 - number].items()


def test_groups_of_the_first_model_s_engines_keep_its_name(tmp_path: Path) -> None:
    manifests = kustomize.build(stage(tmp_path, "gpu", "second-model", "leaderworkerset"))
    group = the(manifests, "LeaderWorkerSet", "engine-group")
    first, second = _engines(manifests)
    assert group["spec"]["leaderWorkerTemplate"]["workerTemplate"] == first["spec"]["template"]
    assert (first["spec"]["replicas"], second["spec"]["replicas"]) == (0, 1)


def test_each_set_is_scaled_by_what_waits_for_its_own_model(tmp_path: Path) -> None:
    components = ("observability", "autoscale", "second-model", "second-model/autoscale")
    manifests = kustomize.build(stage(tmp_path, *components))
    alone = the(kustomize.build(K8S / "overlays/production"), "ScaledObject", "engine")
    for name in SETS:
        scaled = the(manifests, "ScaledObject", name)
        target = scaled["spec"]["scaleTargetRef"]
        assert find(manifests, target["kind"], target["name"]) in _engines(manifests)
        assert target["name"] == name
        variables = variables_of(manifests, dict(containers(manifests))[f"{name}/engine"])
        for trigger, before in zip(scaled["spec"]["triggers"], alone["spec"]["triggers"], strict=True):
            query = trigger["metadata"]["query"]
            assert set(re.findall(r"millrace_\w+", query)) <= set(names.METRICS)
            (model,) = re.findall(r'millrace_build_info{model="([^"]+)"}', query)
            assert model == variables["MILLRACE_MODEL__NAME"]
            # Otherwise it is as with one model.
            joined = f' * on (instance) group_left () millrace_build_info{{model="{model}"}}'
            assert query.replace(joined, "") == before["metadata"]["query"]
            trigger["metadata"]["query"] = before["metadata"]["query"]
            assert trigger == before
        assert {**scaled["spec"], "scaleTargetRef": ""} == {**alone["spec"], "scaleTargetRef": ""}


def test_compose_s_second_engine_is_the_first_with_another_model() -> None:
    services = load("docker-compose.yml", "compose.models.yml")["services"]
    first, second = services["engine"], services["engine-second"]
    own = {"build", "environment", "networks"}
    assert {key: value for key, value in first.items() if key not in own} == {
        key: value for key, value in second.items() if key not in own
    }
    assert second["networks"] == {"inside": {"aliases": ["engine"]}}
    image = parse(REPOSITORY / first["build"]["dockerfile"]).environment()
    both = [environment(service) for service in (first, second)]
    served = [_served({**image, **variables}) for variables in both]
    assert served == list(load_models(read_tables(CONFIG, {})).models.values())
    assert both[0] | dict.fromkeys(TOLD, "") == both[1] | dict.fromkeys(TOLD, "")


def test_compose_gives_every_service_the_file_with_both_models() -> None:
    compose = load("docker-compose.yml", "compose.models.yml")
    assert (REPOSITORY / compose["configs"]["millrace"]["file"]).samefile(CONFIG)
    for name in ("configure", "gateway", "tokenizer", *SETS):
        assert compose["services"][name]["configs"] == [
            {"source": "millrace", "target": "/etc/millrace/millrace.toml"}
        ], name
