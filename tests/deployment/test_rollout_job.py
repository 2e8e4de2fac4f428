"""A rollout as a Kubernetes Job: it is rendered, its command runs in its image, it reaches what it needs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from observability.emit import names
from services.gate.cases import LAYERS
from services.rollout.plan import RolloutPlan, read_plan
from tests.deployment import kustomize
from tests.deployment.deployed import Deployment
from tests.deployment.kustomize import Manifest, the
from tests.deployment.manifests import K8S, containers, stage, validate, variables_of
from tests.unit.services.gate.toy import Spoiled, ToyServer, TwoVersions, serving


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
    [
        ("rollout-reads-gateways", "gateway", "metrics"),
        ("rollout-writes-postgres", "postgres", "postgres"),
        # Everybody may reach it.
        ("", "envoy", "api"),
    ],
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
    if policy:
        entering = the(manifests, "NetworkPolicy", policy)["spec"]
        assert entering["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": of}
        (rule,) = entering["ingress"]
        assert rule == {"from": [{"podSelector": {"matchLabels": labels}}], "ports": ports}
    leaving = the(manifests, "NetworkPolicy", "rollout")["spec"]["egress"]
    target = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": of}}}
    assert {"to": [target], "ports": ports} in leaving


def test_its_spans_reach_the_collector(tmp_path: Path) -> None:
    found = kustomize.build(stage(tmp_path, "postgres", "observability", "rollout"))
    (container,) = pod(found)["containers"]
    assert variables_of(found, container)["MILLRACE_OBSERVABILITY__OTLP_ENDPOINT"] == "collector:4317"
    leaving = the(found, "NetworkPolicy", "spans-out")["spec"]["podSelector"]
    (entering,) = the(found, "NetworkPolicy", "collector")["spec"]["ingress"]
    for selector in (leaving, entering["from"][0]["podSelector"]):
        assert "rollout" in selector["matchExpressions"][0]["values"]


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


METRICS = f"""process_start_time_seconds 1
{names.ROUTE_SHARE.name}{{alias="chat",model="chat@1"}} 1
{names.ROUTE_SHARE.name}{{alias="chat",model="chat@2"}} 0
{names.ROUTE_ENGINES.name}{{alias="chat",model="chat@2"}} 1
"""
MODELS = """
[models."chat@1"]
path = "a"
[models."chat@2"]
path = "b"
[routes]
chat = {"chat@1" = 100, "chat@2" = 0}
"""


@contextmanager
def gateway_metrics() -> Iterator[str]:
    """Address of a page that says what a gateway does, which has followed whatever takes a candidate back."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(METRICS.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"127.0.0.1:{listener.server_port}"
        finally:
            listener.shutdown()
            thread.join()


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_every_layer_of_its_suite_runs_in_the_gateway_s_image(root: Path, manifests: list[Manifest]) -> None:
    (container,) = pod(manifests)["containers"]
    mounted = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
    bad = ToyServer(Spoiled(adapter=1.0))
    with (
        closing(Deployment(root)) as deployment,
        serving(TwoVersions(second=bad)) as server,
        gateway_metrics() as address,
    ):
        for path in mounted - {"/tmp"}:
            deployment.mount(path, path.rpartition("/")[2])
        plan = deployment.mount("/etc/millrace-rollout", "plan")
        (plan / "millrace.toml").write_text(MODELS)
        (plan / "rollout.toml").write_text('[gate]\nsuite = "suite.toml"\n')
        (plan / "suite.toml").write_text("".join(f"[{layer}]\n" for layer in LAYERS))
        replaced = {
            "--config": "--config=/etc/millrace-rollout/millrace.toml",
            "--target": f"--target=gateway={address}",
            "--url": f"--url={server.url}",
        }
        arguments = [replaced.get(each.partition("=")[0], each) for each in container["args"]]
        own = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        variables = {
            **own,
            "MILLRACE_GATEWAY__LEDGER__URL": "sqlite:////var/lib/millrace/state/ledger.sqlite",
            "MILLRACE_SECURITY__CONTEXT_SECRET": "a secret of this test",
            "MILLRACE_API_KEY": "mr-of-the-suite",
        }
        started = deployment.start(
            "gate",
            "services/gateway/Dockerfile",
            [*container["command"], *arguments],
            variables,
            sorted(mounted),
        )
        assert started.wait() == 1, started.log.read_text()
        (line,) = [
            each for each in started.log.read_text().splitlines() if "take back: the gate: worse" in each
        ]
        for layer in LAYERS:
            assert f"{layer} " in line, line
        assert "tokens worse" in line
        assert server.keys == {"Bearer mr-of-the-suite"}
