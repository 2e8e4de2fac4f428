"""The part of kustomize that k8s/ uses, so that tests need no binary; a test compares it with the real."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

# Lists whose items Kubernetes merges by a key instead of replacing the list.
_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
_KNOWN = {
    "apiVersion",
    "kind",
    "namespace",
    "labels",
    "resources",
    "components",
    "configMapGenerator",
    "secretGenerator",
    "patches",
    "replacements",
    # It tells the real one where names are that get a hash suffix; here none does.
    "configurations",
}


def build(folder: Path) -> list[Manifest]:
    """Renders a kustomization. Generated names get no hash suffix."""
    manifests = _accumulate(folder.resolve(), [])
    order = {"Namespace": 0}
    return sorted(manifests, key=lambda manifest: order.get(manifest["kind"], 1))


def _accumulate(folder: Path, manifests: list[Manifest]) -> list[Manifest]:
    rules = yaml.safe_load((folder / "kustomization.yaml").read_text())
    unknown = set(rules) - _KNOWN
    if unknown:
        raise ValueError(f"{folder}: not supported here: {unknown}")
    for name in rules.get("resources", ()):
        path = folder / name
        if path.is_dir():
            manifests = [*manifests, *_accumulate(path.resolve(), [])]
        else:
            manifests = [*manifests, *filter(None, yaml.safe_load_all(path.read_text()))]
    for name in rules.get("components", ()):
        manifests = _accumulate((folder / name).resolve(), manifests)
    _transform(rules, folder, manifests)
    return manifests


def _transform(rules: dict[str, Any], folder: Path, manifests: list[Manifest]) -> None:
    for entry in rules.get("configMapGenerator", ()):
        _generate("ConfigMap", "data", entry, folder, manifests)
    for entry in rules.get("secretGenerator", ()):
        _generate("Secret", "stringData", entry, folder, manifests)
    for patch in rules.get("patches", ()):
        _patch(manifests, patch)
    for entry in rules.get("replacements", ()):
        _replace(manifests, entry)
    for entry in rules.get("labels", ()):
        _label(manifests, entry["pairs"])
    if "namespace" in rules:
        for manifest in manifests:
            if manifest["kind"] != "Namespace":
                manifest["metadata"]["namespace"] = rules["namespace"]


def _generate(kind: str, field: str, entry: dict[str, Any], folder: Path, manifests: list[Manifest]) -> None:
    data: dict[str, str] = {}
    for text in entry.get("files", ()):
        key, _, name = text.rpartition("=")
        path = folder / name
        if not path.resolve().is_relative_to(folder):
            raise ValueError(f"{path}: kustomize reads nothing outside {folder}")
        data[key or path.name] = path.read_text()
    for text in entry.get("literals", ()):
        key, _, value = text.partition("=")
        data[key] = value
    existing = find(manifests, kind, entry["name"])
    if entry.get("behavior") == "merge":
        assert existing is not None, f"nothing to merge {entry['name']} into"
        existing[field].update(data)
        return
    assert existing is None, f"{entry['name']} is there already"
    metadata: dict[str, Any] = {"name": entry["name"]}
    manifests.append({"apiVersion": "v1", "kind": kind, "metadata": metadata, field: data})


def _patch(manifests: list[Manifest], patch: dict[str, Any]) -> None:
    target, change = patch["target"], yaml.safe_load(patch["patch"])
    manifest = the(manifests, target["kind"], target["name"])
    merged = _merge(manifest, change, "")
    manifest.clear()
    manifest.update(merged)


def _replace(manifests: list[Manifest], entry: dict[str, Any]) -> None:
    value: Any = the(manifests, entry["source"]["kind"], entry["source"]["name"])
    for key in entry["source"]["fieldPath"].split("."):
        value = value[key]
    for target in entry["targets"]:
        manifest = the(manifests, target["select"]["kind"], target["select"]["name"])
        for path in target["fieldPaths"]:
            *parents, last = path.split(".")
            place: Any = manifest
            for key in parents:
                place = place[key]
            assert last in place, f"{path} is not there to be replaced"
            place[last] = copy.deepcopy(value)


def _merge(base: Any, change: Any, key: str) -> Any:
    if isinstance(base, dict) and isinstance(change, dict):
        result = dict(base)
        for name, value in change.items():
            if value is None:
                result.pop(name, None)
            else:
                result[name] = _merge(base[name], value, name) if name in base else copy.deepcopy(value)
        return result
    if isinstance(base, list) and isinstance(change, list) and key in _MERGE_KEYS:
        merge_key = _MERGE_KEYS[key]
        items = {item[merge_key]: item for item in base}
        for item in change:
            name = item[merge_key]
            items[name] = _merge(items[name], item, "") if name in items else copy.deepcopy(item)
        return list(items.values())
    return copy.deepcopy(change)


def _label(manifests: list[Manifest], pairs: dict[str, str]) -> None:
    for manifest in manifests:
        manifest["metadata"].setdefault("labels", {}).update(pairs)
        template = (
            manifest.get("spec", {}).get("template") if isinstance(manifest.get("spec"), dict) else None
        )
        if template:
            template["metadata"].setdefault("labels", {}).update(pairs)


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest | None:
    """The manifest of that kind and name, where there is one."""
    alike = (each for each in manifests if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return next(alike, None)


def the(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The manifest of that kind and name, which must be there."""
    manifest = find(manifests, kind, name)
    assert manifest is not None, f"no {kind} {name}"
    return manifest
