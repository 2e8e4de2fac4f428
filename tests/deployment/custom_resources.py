"""JSON schemas of kinds that Kubernetes itself does not know, after their public API references.

Only what an author writes (`spec`), without status. Pod templates are checked by Kubernetes' own schema.
"""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import kubernetes_validate

from tests.deployment.kustomize import Manifest

_POSITIVE = {"type": "integer", "minimum": 1}
_PORT = {
    "type": "object",
    "required": ["number"],
    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}},
    "additionalProperties": False,
}
_AMOUNT = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^\d+%$"}]}
_LABEL = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"

# https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/
_LEADER_WORKER_SET = {
    "type": "object",
    "required": ["leaderWorkerTemplate"],
    "additionalProperties": False,
    "properties": {
        "replicas": {"type": "integer", "minimum": 0},
        "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
        "rolloutStrategy": {
            "type": "object",
            "required": ["type"],
            "additionalProperties": False,
            "properties": {
                "type": {"enum": ["RollingUpdate"]},
                "rollingUpdateConfiguration": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "partition": {"type": "integer", "minimum": 0},
                        "maxUnavailable": _AMOUNT,
                        "maxSurge": _AMOUNT,
                    },
                    # Nothing could ever be replaced.
                    "not": {
                        "required": ["maxUnavailable"],
                        "properties": {"maxUnavailable": {"const": 0}, "maxSurge": {"const": 0}},
                    },
                },
            },
        },
        "networkConfig": {
            "type": "object",
            "required": ["subdomainPolicy"],
            "additionalProperties": False,
            "properties": {"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}},
        },
        "leaderWorkerTemplate": {
            "type": "object",
            "required": ["workerTemplate"],
            "additionalProperties": False,
            "properties": {
                "leaderTemplate": {"type": "object"},
                "workerTemplate": {"type": "object", "required": ["spec"]},
                "size": _POSITIVE,
                "restartPolicy": {
                    "enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
                },
                "subGroupPolicy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "subGroupPolicyType": {"enum": ["LeaderWorker", "LeaderExcluded"]},
                        "subGroupSize": _POSITIVE,
                    },
                },
                "volumeClaimTemplates": {"type": "array", "items": {"type": "object"}},
                "persistentVolumeClaimRetentionPolicy": {"type": "object"},
            },
        },
    },
}

# https://gateway-api-inference-extension.sigs.k8s.io/reference/spec/
_INFERENCE_POOL = {
    "type": "object",
    "required": ["selector", "targetPorts", "endpointPickerRef"],
    "additionalProperties": False,
    "properties": {
        "selector": {
            "type": "object",
            "required": ["matchLabels"],
            "additionalProperties": False,
            "properties": {
                "matchLabels": {
                    "type": "object",
                    "additionalProperties": {"type": "string", "maxLength": 63, "pattern": _LABEL},
                }
            },
        },
        "targetPorts": {
            "type": "array",
            "minItems": 1,
            "maxItems": 8,
            "uniqueItems": True,
            "items": _PORT,
        },
        "appProtocol": {"enum": ["http", "kubernetes.io/h2c"]},
        "endpointPickerRef": {
            "type": "object",
            "required": ["name"],
            "additionalProperties": False,
            "properties": {
                "group": {"type": "string", "maxLength": 253},
                "kind": {"type": "string", "minLength": 1, "maxLength": 63},
                "name": {"type": "string", "minLength": 1, "maxLength": 253},
                "port": _PORT,
                "failureMode": {"enum": ["FailOpen", "FailClose"]},
            },
            # A Service, which is what an absent kind means, needs its port.
            "anyOf": [
                {"required": ["port"]},
                {"required": ["kind"], "properties": {"kind": {"not": {"const": "Service"}}}},
            ],
        },
    },
}

_SCHEMAS: dict[tuple[str, str], dict[str, Any]] = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _LEADER_WORKER_SET,
    ("inference.networking.k8s.io/v1", "InferencePool"): _INFERENCE_POOL,
}
KINDS = frozenset(kind for _, kind in _SCHEMAS)


def validate(manifest: Manifest) -> None:
    """Raises jsonschema_rs.ValidationError, or kubernetes_validate's for a pod template within."""
    schema = _SCHEMAS[manifest["apiVersion"], manifest["kind"]]
    unknown = manifest.keys() - {"apiVersion", "kind", "metadata", "spec"}
    assert not unknown, unknown
    jsonschema_rs.validate(schema, manifest["spec"])
    group = manifest["spec"].get("leaderWorkerTemplate", {})
    for name in ("leaderTemplate", "workerTemplate"):
        if name in group:
            pod = {
                "apiVersion": "v1",
                "kind": "PodTemplate",
                "metadata": {"name": name},
                "template": group[name],
            }
            kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
