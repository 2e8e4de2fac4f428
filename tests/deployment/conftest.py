"""What several tests of the deployment share."""

from __future__ import annotations

import pytest

from tests.deployment import kustomize
from tests.deployment.kustomize import Manifest
from tests.deployment.manifests import K8S, TARGETS


@pytest.fixture(params=TARGETS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return kustomize.build(K8S / request.param)
