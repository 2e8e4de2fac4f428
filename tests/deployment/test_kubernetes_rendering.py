"""Manifests against the Kubernetes schemas, and our rendering against the real kustomize."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deployment import kustomize
from tests.deployment.containerfile import REPOSITORY
from tests.deployment.kustomize import Manifest
from tests.deployment.manifests import (
    K8S,
    TARGETS,
    stage,
    validate,
)


def test_manifests_fit_the_schemas(manifests: list[Manifest]) -> None:
    assert len(manifests) >= 20
    for manifest in manifests:
        validate(manifest)


needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")


@needs_kubectl
@pytest.mark.parametrize("target", TARGETS)
def test_the_real_kustomize_renders_the_same(target: str) -> None:
    _compare_with_the_real(K8S / target)


OPTIONAL = (
    ("gpu", "mtls", "monitors", "leaderworkerset", "inferencepool"),
    ("cpu", "second-model"),
    ("gpu", "mtls", "second-model", "leaderworkerset"),
    ("observability", "autoscale", "second-model", "second-model/autoscale"),
    ("observability", "autoscale", "autoscale/goodput"),
)


@needs_kubectl
@pytest.mark.parametrize("components", OPTIONAL, ids="+".join)
def test_the_real_kustomize_renders_the_optional_components_the_same(
    tmp_path: Path, components: tuple[str, ...]
) -> None:
    _compare_with_the_real(stage(tmp_path, *components))


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
