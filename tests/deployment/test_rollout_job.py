"""A rollout as a Kubernetes Job: it is rendered, its command runs in its image, it reaches what it needs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from services.rollout.plan import RolloutPlan, read_plan
from tests.deployment import kustomize
from tests.deployment.deployed import Deployment
from tests.deployment.kustomize import Manifest, the
from tests.deployment.manifests import K8S, containers, stage, validate


@pytest.fixture
def manifests(tmp_path: Path) -> list[Manifest]:
    found = kustomize.build(stage(tmp_path, "postgres", "rollout"))
    for manifest in found:
        validate(manifest)
    return found


def pod(manifests: list[Manifest]) -> dict[str, Any]:
    spec: dict[str, Any] = the(manifests, "Job", "rollout")["spec"]["template"]["spec"]
    return spec


def test_its_pod_is_a_gateway_s_in_image_user_and_database(manifests: list[Manifest]) -> None:
    (container,) = pod(manifests)["containers"]
    gateway = dict(containers(manifests))["gateway/gateway"]
    gateway_pod = the(manifests, "Deployment", "gateway")["spec"]["template"]["spec"]
    assert container["image"] == gateway["image"]
    assert container["securityContext"] == gateway["securityContext"]
    assert container["envFrom"] == gateway["envFrom"]
    url = "MILLRACE_GATEWAY__LEDGER__URL"
    told = [
        next(each.get("valueFrom") for each in variables if each["name"] == url)
        for variables in (container["env"], gateway["env"])
    ]
    assert told[0] == told[1]
    for key in ("securityContext", "automountServiceAccountToken"):
        assert pod(manifests)[key] == gateway_pod[key]
    the(manifests, "ServiceAccount", pod(manifests)["serviceAccountName"])


def test_a_pod_that_is_lost_is_replaced_and_one_that_took_back_is_not(manifests: list[Manifest]) -> None:
    spec = the(manifests, "Job", "rollout")["spec"]
    failed, lost = spec["podFailurePolicy"]["rules"]
    assert (failed["action"], failed["onExitCodes"]["values"]) == ("FailJob", [1])
    assert lost["action"] == "Ignore"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize(
    ("policy", "of", "name"),
    [("rollout-reads-gateways", "gateway", "metrics"), ("rollout-writes-postgres", "postgres", "postgres")],
)
def test_policies_let_it_through_on_both_sides(
    manifests: list[Manifest], policy: str, of: str, name: str
) -> None:
    port = next(
        each["containerPort"]
        for each in dict(containers(manifests))[f"{of}/{of}"]["ports"]
        if each["name"] == name
    )
    ports = [{"protocol": "TCP", "port": port}]
    labels = the(manifests, "Job", "rollout")["spec"]["template"]["metadata"]["labels"]
    entering = the(manifests, "NetworkPolicy", policy)["spec"]
    assert entering["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": of}
    (rule,) = entering["ingress"]
    assert rule == {"from": [{"podSelector": {"matchLabels": labels}}], "ports": ports}
    leaving = the(manifests, "NetworkPolicy", "rollout")["spec"]["egress"]
    target = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": of}}}
    assert {"to": [target], "ports": ports} in leaving


def test_its_plan_has_the_default_steps_and_a_dead_man_s_interval() -> None:
    plan = read_plan(K8S / "components/rollout/rollout.toml")
    assert plan.steps == RolloutPlan().steps
    assert plan.dead_man_s > 0


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_its_command_runs_in_the_gateway_s_image(root: Path, manifests: list[Manifest]) -> None:
    (container,) = pod(manifests)["containers"]
    with closing(Deployment(root)) as deployment:
        deployment.mount("/var/lib/millrace/state", "state")
        variables = {
            "MILLRACE_GATEWAY__LEDGER__URL": "sqlite:////var/lib/millrace/state/ledger.sqlite",
            "MILLRACE_SECURITY__CONTEXT_SECRET": "a secret of this test",
        }
        arguments = [each for each in container["args"] if not each.startswith("--plan")]
        writable = ["/tmp", "/var/lib/millrace/state"]
        for name, argv, status, told in (
            ("run", arguments, 2, "[routes] has no alias 'chat'"),
            ("status", [*arguments[:2], "status"], 0, "there has been no rollout"),
        ):
            started = deployment.start(
                name, "services/gateway/Dockerfile", [*container["command"], *argv], variables, writable
            )
            assert started.wait() == status, started.log.read_text()
            assert told in started.log.read_text()
