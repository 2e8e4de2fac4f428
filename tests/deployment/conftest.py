"""What several tests of the deployment share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployment import kustomize
from tests.deployment.kustomize import Manifest
from tests.deployment.manifests import K8S, TARGETS


@pytest.fixture(params=TARGETS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return kustomize.build(K8S / request.param)


@pytest.fixture
def root() -> Iterator[Path]:
    # Not pytest's own folder: the containers' user must be able to pass through.
    folder = Path(tempfile.mkdtemp(prefix="millrace-deployment-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
