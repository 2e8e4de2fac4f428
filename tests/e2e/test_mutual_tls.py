"""A whole stack whose processes prove themselves to each other, and whose edge speaks TLS as well."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from millrace.engine.v1 import engine_pb2, engine_pb2_grpc

from services.cli.inference import InferenceClient
from services.cli.target import find_target
from tests.e2e.stack import CONFIG, Stack, running_stack

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")

_SCRIPT = Path(__file__).resolve().parents[2] / "services/envoy/make-certificates.sh"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    subprocess.run(["/bin/sh", str(_SCRIPT), str(folder)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[Stack]:
    variables = {
        "MILLRACE_SECURITY__TLS_CERTIFICATE": str(certificates / "internal.crt"),
        "MILLRACE_SECURITY__TLS_KEY": str(certificates / "internal.key"),
        "MILLRACE_SECURITY__TLS_AUTHORITY": str(certificates / "internal-ca.crt"),
        "MILLRACE_ENVOY__TLS_CERTIFICATE": str(certificates / "tls.crt"),
        "MILLRACE_ENVOY__TLS_KEY": str(certificates / "tls.key"),
    }
    folder = tmp_path_factory.mktemp("secure")
    with running_stack(folder, "--simulated", config=CONFIG, environment=variables) as stack:
        yield stack


def test_requests_pass_through_every_service(secure: Stack, certificates: Path) -> None:
    url = f"https://{secure.address}/v1"
    trusting = httpx.Client(
        verify=ssl.create_default_context(cafile=certificates / "ca.crt"), trust_env=False
    )
    with secure.openai().with_options(base_url=url, http_client=trusting) as client:
        stream = client.chat.completions.create(
            model=secure.model, messages=[{"role": "user", "content": "Hello!"}], max_tokens=4, stream=True
        )
        chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_the_command_line_knows_that_its_stack_speaks_tls(
    secure: Stack, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = secure.state
    target = find_target(environ={"MILLRACE_STATE_DIR": str(Path(state.trace_store).parent)})
    assert target.url == f"https://{state.address}"
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.crt"))
    with InferenceClient(target) as client:
        assert client.default_model() == secure.model


def test_nobody_without_a_certificate_reaches_a_service(secure: Stack, certificates: Path) -> None:
    anonymous = grpc.ssl_channel_credentials((certificates / "internal-ca.crt").read_bytes())
    options = (("grpc.ssl_target_name_override", "millrace.internal"),)
    for address in secure.addresses("engine", "grpc"):
        for channel in (
            grpc.insecure_channel(address),
            grpc.secure_channel(address, anonymous, options=options),
        ):
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            with channel, pytest.raises(grpc.RpcError) as refused:
                stub.CheckInvariants(engine_pb2.CheckInvariantsRequest(), timeout=20)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    for address in secure.addresses("gateway", "http"):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://{address}/health", trust_env=False)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"https://{address}/health", verify=False, trust_env=False)
