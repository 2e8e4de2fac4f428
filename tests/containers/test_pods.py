"""k8s/overlays/local pod by pod in a real container engine, with the probes that a kubelet would ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.containers.engine import ask, streams
from tests.containers.pods import Pods
from tests.deployment import kustomize
from tests.deployment.manifests import K8S

pytestmark = pytest.mark.timeout(900)


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
            for kind in ("startup", "readiness", "liveness"):
                print(f"\n{name} {kind}: {pods.wait(name, kind):.1f} s", end="")
        answer = ask(url)
        assert answer.status_code == 200, answer.text
        with streams(url, 3, num_tokens=300):
            assert pods.stop("envoy") == 0
