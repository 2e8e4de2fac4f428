"""The rendered manifests of Kubernetes, for the tests that look into them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from tests.deployment import custom_resources
from tests.deployment.containerfile import REPOSITORY
from tests.deployment.kustomize import Manifest, the

K8S = REPOSITORY / "k8s"


TARGETS = ("base", "overlays/local", "overlays/production")


WORKLOADS = ("Deployment", "StatefulSet")


# Kinds of operators that are not part of Kubernetes, without a schema here.
CUSTOM = {"PodMonitor", "ScaledObject"}


def workloads(manifests: list[Manifest]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and pod specs of what runs."""
    for manifest in manifests:
        if manifest["kind"] in WORKLOADS:
            yield manifest["metadata"]["name"], manifest["spec"]["template"]["spec"]


def containers(manifests: list[Manifest], *, init: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """Containers by workload/container."""
    for name, pod in workloads(manifests):
        for container in [*(pod.get("initContainers", []) if init else []), *pod["containers"]]:
            yield f"{name}/{container['name']}", container


def validate(manifest: Manifest) -> None:
    """Raises when the manifest does not fit the schema of its kind."""
    if manifest["kind"] in custom_resources.KINDS:
        custom_resources.validate(manifest)
    elif manifest["kind"] not in CUSTOM:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def stage(folder: Path, *components: str) -> Path:
    """A copy of the manifests with an overlay of the base and these components; the overlay's folder."""
    staged = folder / "k8s"
    shutil.copytree(K8S, staged)
    names = [f"../components/{name}" for name in components]
    rules = {"namespace": "millrace", "resources": ["../base"], "components": names}
    (staged / "overlays/kustomization.yaml").write_text(yaml.safe_dump(rules))
    return staged / "overlays"


def variables_of(manifests: list[Manifest], container: dict[str, Any]) -> dict[str, str]:
    """Variables of a container, without what only a cluster knows."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        config_map = the(manifests, "ConfigMap", source["configMapRef"]["name"])
        found |= config_map["data"]
    for entry in container.get("env", ()):
        found[entry["name"]] = entry.get("value", "")
    if "MILLRACE_KEYS__ENTRIES" in found:
        found["MILLRACE_KEYS__ENTRIES"] = "[]"
    return found
