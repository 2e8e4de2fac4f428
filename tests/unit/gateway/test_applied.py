"""What `configure` makes, and that it refuses an edited file exactly where gateways run with another one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from observability.emit import names
from observability.emit.metrics import Metrics
from runtime import models
from runtime.models import Source, sha256_of
from tests.unit.gateway.rig.deployment import deployed

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "millrace.toml"
    path.write_text("[envoy]\n")
    return path


@pytest.fixture
def gateway(config: Path) -> Iterator[tuple[Metrics, str]]:
    """What a gateway tells that was started with the file as it is, and where."""
    metrics = Metrics()
    metrics.set(names.CONFIGURATION_INFO, 1, sha256=sha256_of(config))
    yield metrics, metrics.serve("127.0.0.1:0", "gateway.metrics_listen")
    metrics.close()


def configure(config: Path, gateways: str) -> subprocess.CompletedProcess[str]:
    """Runs the script of the containers; what it makes lies beside the file."""
    folders = [config.parent / name for name in ("secrets", "edge")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    script = REPOSITORY / "services/gateway/configure.sh"
    return subprocess.run(
        ["/bin/sh", str(script), str(config), *map(str, folders), gateways],
        cwd=REPOSITORY,
        env={
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/contract/stubs",
        },
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_edit_is_refused_until_gateways_run_with_it(config: Path, gateway: tuple[Metrics, str]) -> None:
    """Whoever made them anew, and whatever was rendered before."""
    metrics, address = gateway
    rendered = config.parent / "edge/envoy.yaml"
    assert configure(config, address).returncode == 0
    before, old = rendered.read_text(), sha256_of(config)
    config.write_text('[envoy]\ncors_origins = ["https://app.example"]\n')
    refused = configure(config, address)
    assert refused.returncode == 1
    assert str(config) in refused.stderr
    assert "docker compose up --detach --build --force-recreate" in refused.stderr
    assert rendered.read_text() == before
    # One of two has been replaced.
    metrics.set(names.CONFIGURATION_INFO, 1, sha256=sha256_of(config))
    assert configure(config, address).returncode == 1
    metrics.remove(names.CONFIGURATION_INFO, sha256=old)
    done = configure(config, address)
    assert done.returncode == 0, done.stderr
    assert "envoy.filters.http.cors" not in before
    assert "envoy.filters.http.cors" in rendered.read_text()


def test_the_secret_of_a_deployment_is_made_once_and_is_its_owner_s_alone(config: Path) -> None:
    secret = config.parent / "secrets/context_secret"
    assert configure(config, "").returncode == 0
    first = secret.read_text()
    assert len(first.strip()) == 64
    assert secret.stat().st_mode & 0o077 == 0
    assert configure(config, "").returncode == 0
    assert secret.read_text() == first


@pytest.mark.parametrize("gateways", ["", "nobody.invalid:9464", "127.0.0.1:1"])
def test_an_edit_is_taken_where_no_gateway_runs(config: Path, gateways: str) -> None:
    assert configure(config, gateways).returncode == 0
    config.write_text("# Edited.\n")
    done = configure(config, gateways)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def started_with(config: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The sum of the file that this process read when it started; it was edited, and read, since."""
    monkeypatch.setattr(models, "_current", [Source(None, {})])
    models.use(Source(config, {})).read()
    first = sha256_of(config)
    config.write_text("# Edited.\n")
    models.source().read()
    return first


async def test_a_gateway_tells_the_file_that_it_was_started_with(started_with: str) -> None:
    """Of a file that is read again what is served is taken alone."""
    async with deployed() as gateway:
        body, _ = gateway.metrics.expose()
    assert f'{names.CONFIGURATION_INFO.name}{{sha256="{started_with}"}} 1.0' in body.decode()
