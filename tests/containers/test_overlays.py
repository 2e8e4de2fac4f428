"""The overlays of docker-compose.yml in a real engine: TLS, a public port, a second model."""

from __future__ import annotations

import hashlib
import ssl
import subprocess
from pathlib import Path

import pytest

from tests.containers.engine import MODEL, PORTS, SECOND_MODEL, Compose, ask, run, wait_until

pytestmark = pytest.mark.timeout(900)


def _variables(certificates: Path) -> dict[str, str]:
    return {"CERTIFICATES": str(certificates), "CERTIFICATES_GID": str(certificates.stat().st_gid)}


@pytest.mark.parametrize(
    "overlays",
    [("compose.tls.yml",), ("compose.mtls.yml",), ("compose.tls.yml", "compose.mtls.yml")],
    ids=["tls", "mtls", "tls+mtls"],
)
def test_certificates_that_a_group_reads_serve(certificates: Path, overlays: tuple[str, ...]) -> None:
    assert certificates.stat().st_mode & 0o777 == 0o750
    with Compose(*overlays, variables=_variables(certificates)) as stack:
        stack.up()
        tls = "compose.tls.yml" in overlays
        url = stack.url.replace("http://127.0.0.1", "https://localhost") if tls else stack.url
        answer = ask(url, verify=ssl.create_default_context(cafile=certificates / "ca.crt"))
        assert answer.status_code == 200, answer.text
        for name in ("envoy", "gateway", "tokenizer", "engine"):
            mounts = stack.inspect(name)[0]["Mounts"]
            sources = [Path(mount["Source"]) for mount in mounts if "Source" in mount]
            given = [path for path in sources if path.is_relative_to(certificates)]
            assert all(path.is_file() for path in given), "a folder would bring all keys"
            assert not [path for path in given if path.name.endswith("ca.key")]
            modes = {path.stat().st_mode & 0o777 for path in given}
            assert modes <= {0o640}, "its group reads, and nobody else"
            assert len(given) == (2 if tls and name == "envoy" else 0) + (
                3 if "compose.mtls.yml" in overlays else 0
            )
        # The command line, with the same authority.
        told = subprocess.run(
            [".venv/bin/millrace", "models", "--url", url],
            env={
                "PATH": "/usr/bin:/bin",
                "SSL_CERT_FILE": str(certificates / "ca.crt"),
                "MILLRACE_API_KEY": "mr-dev-local",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert told.returncode == 0, told.stderr
        assert "millrace-nano" in told.stdout


def test_a_certificate_that_is_missing_is_not_made_a_folder(tmp_path: Path) -> None:
    variables = {"CERTIFICATES": str(tmp_path), "CERTIFICATES_GID": "0"}
    with Compose("compose.tls.yml", variables=variables) as stack:
        with pytest.raises(AssertionError, match=r"tls\.(crt|key)"):
            stack.up("--no-deps", "envoy")
        assert list(tmp_path.iterdir()) == []


def test_the_public_port_takes_its_own_key_alone() -> None:
    variables = {
        "API_KEY_SHA256": hashlib.sha256(b"mr-of-their-own").hexdigest(),
        "PUBLIC_PORT": PORTS["TEST_API_PORT"],
    }
    with Compose("compose.public.yml", variables=variables) as stack:
        stack.up()
        assert ask(stack.url, key={"authorization": "Bearer mr-of-their-own"}).status_code == 200
        assert ask(stack.url).status_code == 401
        (envoy,) = stack.inspect("envoy")
        assert {each["HostIp"] for each in envoy["NetworkSettings"]["Ports"]["8080/tcp"]} >= {"0.0.0.0"}


def test_engines_of_two_models_serve_behind_one_api_and_are_scaled_each_by_themselves() -> None:
    with Compose("compose.models.yml") as stack:
        # The images are those of this checkout, so that nothing is left to be built below.
        stack.up("--build")
        for model in (MODEL, SECOND_MODEL):
            answer = ask(stack.url, model=model)
            assert answer.status_code == 200, answer.text
            assert f'"model":"{model}"' in answer.text.replace(" ", "")
        _edit(stack)
        stack.up("--scale", "engine-second=2")
        assert [len(stack.containers(name)) for name in ("engine", "engine-second")] == [1, 2]
        # With the first of them gone there is another one, of the same model.
        run("docker", "stop", "-t", "45", stack.containers("engine-second")[0])
        wait_until(
            lambda: ask(stack.url, model=SECOND_MODEL).status_code == 200, "the other one does not serve"
        )
        assert ask(stack.url).status_code == 200


def _edit(stack: Compose) -> None:
    """An edited file that no image holds is refused, and applied as it is told."""
    stack.config.write_text(stack.config.read_text() + "\n# Edited.\n")
    running = set(stack.containers("gateway"))
    with pytest.raises(AssertionError, match="configure"):
        stack.up("--build")
    assert "docker compose up --detach --build --force-recreate" in stack.do("logs", "configure")
    assert set(stack.containers("gateway")) == running
    stack.up("--build", "--force-recreate")
    assert not running & set(stack.containers("gateway"))
    assert ask(stack.url).status_code == 200
    # Nothing is left to be applied.
    stack.up()
