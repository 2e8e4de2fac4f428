"""k8s/ pod by pod in a real container engine, with the probes that a kubelet would ask."""

from __future__ import annotations

import re
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.containers.engine import MODEL, SECOND_MODEL, ask, run, streams, wait_until
from tests.containers.pods import NETWORK, Pods
from tests.deployment import kustomize
from tests.deployment.kustomize import Manifest, find
from tests.deployment.manifests import K8S, stage

pytestmark = pytest.mark.timeout(900)

PROBES = ("startup", "readiness", "liveness")
# Longer than the pods' preStop hooks take, so that processes are told to end under way.
NUM_TOKENS = 3000
UNNOTICED = "Envoy does not notice that the gateway is ready"


def test_pods_start_serve_and_drain_as_the_manifests_say(tmp_path: Path) -> None:
    with Pods(kustomize.build(K8S / "overlays/local"), tmp_path) as pods:
        for name in ("redis", "jaeger", "collector", "prometheus", "tokenizer", "gateway", "envoy"):
            pods.start(name)
        # Without an engine, which may load for long, a gateway is alive and gets no requests.
        pods.wait("gateway", "startup")
        assert pods.probe("gateway", "liveness")
        assert not pods.probe("gateway", "readiness")
        url = f"http://{pods.address('envoy')}:8080"
        pods.wait("envoy", "readiness")
        refused = ask(url)
        assert refused.status_code == 503
        assert "lack an engine" in refused.text
        pods.start("engine")
        for name in ("redis", "prometheus", "tokenizer", "engine", "gateway", "envoy"):
            times = ", ".join(f"{kind} {pods.wait(name, kind):.1f} s" for kind in PROBES)
            print(f"\n{name}: {times}", end="")
        wait_until(lambda: ask(url).status_code == 200, UNNOTICED)
        # As when a node is drained.
        with streams(url, 3, NUM_TOKENS), ThreadPoolExecutor() as pool:
            statuses = pool.map(pods.stop, ("envoy", "gateway", "engine", "tokenizer"))
            assert list(statuses) == [0, 0, 0, 0]


def test_pods_of_two_models_are_found_under_one_name(tmp_path: Path) -> None:
    manifests = kustomize.build(stage(tmp_path / "staged", "redis", "second-model"))
    known = find(kustomize.build(K8S / "overlays/local"), "Secret", "millrace-secrets")
    assert known is not None
    names = ("redis", "tokenizer", "engine", "engine-second", "gateway", "envoy")
    with Pods([*manifests, known], tmp_path / "pods") as pods:
        assert pods.services("engine") == pods.services("engine-second") == ["engine"]
        for name in names:
            pods.start(name)
        for name in names:
            for kind in PROBES:
                pods.wait(name, kind)
        url = f"http://{pods.address('envoy')}:8080"
        wait_until(lambda: _serves(url, MODEL), UNNOTICED)
        wait_until(lambda: _serves(url, SECOND_MODEL), "nobody serves the second model")
        for name, model in (("engine", MODEL), ("engine-second", SECOND_MODEL)):
            # By which the queries of `second-model/autoscale` tell them apart.
            page = httpx.get(f"http://{pods.address(name)}:9464/metrics", trust_env=False, timeout=30).text
            assert re.findall(r'^millrace_build_info{.*model="([^"]*)"', page, re.MULTILINE) == [model]
            assert len(re.findall(r"^millrace_engine_requests_waiting[{ ]", page, re.MULTILINE)) == 1
        # Each of them is the other's no replacement: it is one model's alone.
        assert pods.stop("engine-second") == 0
        wait_until(lambda: not _serves(url, SECOND_MODEL), "somebody else serves the second model")
        assert _serves(url, MODEL)
        # A gateway that has lost its engines is not to be restarted for it.
        assert pods.stop("engine") == 0
        wait_until(lambda: not pods.probe("gateway", "readiness"), "it says that it can serve")
        assert pods.probe("gateway", "liveness")
        time.sleep(pods.period_s("gateway", "liveness"))
        assert pods.probe("gateway", "liveness")
        assert not pods.probe("gateway", "readiness")


def _serves(url: str, model: str) -> bool:
    return ask(url, model=model).status_code == 200


def _secrets(certificates: Path) -> list[Manifest]:
    """Those of the well-known overlay, and what the heads of the components say that one makes."""
    known = find(kustomize.build(K8S / "overlays/local"), "Secret", "millrace-secrets")
    assert known is not None
    data = {**known["stringData"], "postgres_password": "inside"}
    data["ledger_url"] = "postgresql+psycopg://millrace:inside@postgres:5432/ledger"
    pairs = {"tls.crt": "tls.crt", "tls.key": "tls.key"}
    inner = {"tls.crt": "internal.crt", "tls.key": "internal.key", "ca.crt": "internal-ca.crt"}
    made = [("millrace-secrets", data)]
    for name, files in (("millrace-tls", pairs), ("millrace-internal-tls", inner)):
        made.append((name, {key: (certificates / file).read_text() for key, file in files.items()}))
    return [{"kind": "Secret", "metadata": {"name": name}, "stringData": texts} for name, texts in made]


def test_pods_with_certificates_and_a_database_serve_and_keep_the_ledger(
    tmp_path: Path, certificates: Path
) -> None:
    manifests = kustomize.build(stage(tmp_path / "staged", "redis", "postgres", "tls", "mtls"))
    with Pods([*manifests, *_secrets(certificates)], tmp_path / "pods") as pods:
        for name in ("redis", "postgres"):
            pods.start(name)
        for name in ("redis", "postgres"):
            for kind in PROBES:
                pods.wait(name, kind)
        for name in ("tokenizer", "engine", "gateway", "envoy"):
            pods.start(name)
        for name in ("tokenizer", "engine", "gateway", "envoy"):
            for kind in PROBES:
                pods.wait(name, kind)
        # The pod's address is not what the certificate is for.
        trust = ssl.create_default_context(cafile=certificates / "ca.crt")
        trust.check_hostname = False
        url = f"https://{pods.address('envoy')}:8080"
        wait_until(lambda: ask(url, verify=trust).status_code == 200, UNNOTICED)
        query = ("psql", "-U", "millrace", "-d", "ledger", "-tAc", "select count(*) from requests")
        wait_until(
            lambda: int(run("docker", "exec", f"{NETWORK}-postgres", *query)) > 0, "the ledger stays empty"
        )
