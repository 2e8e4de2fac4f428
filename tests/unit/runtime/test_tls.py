"""Services prove themselves to each other, with real certificates and real handshakes."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contract.errors import MillraceError
from runtime import tls
from runtime.channels import connect
from runtime.config import SecurityConfig
from runtime.errors import ConfigError
from runtime.server import GrpcServer
from tests.unit.runtime.test_stream_client import SERVICE as STREAMS
from tests.unit.runtime.test_stream_client import Streams, Talk, register

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")

_SCRIPT = Path(__file__).resolve().parents[3] / "services/envoy/make-certificates.sh"
_CHECK = health_pb2.HealthCheckRequest()


def _make(folder: Path) -> Path:
    subprocess.run(["/bin/sh", str(_SCRIPT), str(folder)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _make(tmp_path_factory.mktemp("certificates"))


def _security(folder: Path, name: str = "internal", authority: str = "internal-ca") -> SecurityConfig:
    return SecurityConfig(
        tls_certificate=str(folder / f"{name}.crt"),
        tls_key=str(folder / f"{name}.key"),
        tls_authority=str(folder / f"{authority}.crt"),
    )


@pytest.fixture(autouse=True)
def plain_again() -> Iterator[None]:
    yield
    tls.use(SecurityConfig())


@asynccontextmanager
async def _server() -> AsyncIterator[str]:
    server = GrpcServer("127.0.0.1:0")
    await server.start()
    await server.set_serving(True)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)


async def _ask(channel: grpc.aio.Channel) -> int:
    async with channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(_CHECK, timeout=20)
    return int(answer.status)


async def _refused(channel: grpc.aio.Channel) -> bool:
    try:
        await _ask(channel)
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.UNAVAILABLE
    return False


async def test_two_services_of_one_deployment_understand_each_other(certificates: Path) -> None:
    tls.use(_security(certificates))
    async with _server() as address:
        assert await _ask(connect(address)) == health_pb2.HealthCheckResponse.SERVING


async def test_nobody_else_is_heard(certificates: Path, tmp_path: Path) -> None:
    """Neither plain text, nor TLS without a certificate, nor one of another authority."""
    secure = tls.use(_security(certificates))
    assert secure is not None
    options = secure.channel_options()
    other = _make(tmp_path)
    theirs = tls.load(_security(other))
    assert theirs is not None
    # Knows the authority and shows a certificate that the edge's authority signed for clients.
    client = grpc.ssl_channel_credentials(
        secure.authority, (certificates / "tls.key").read_bytes(), (certificates / "tls.crt").read_bytes()
    )
    stranger = grpc.ssl_channel_credentials(secure.authority, theirs.key, theirs.certificate)
    anonymous = grpc.ssl_channel_credentials(secure.authority)
    async with _server() as address:
        assert await _refused(grpc.aio.insecure_channel(address))
        for credentials in (anonymous, client, stranger):
            assert await _refused(grpc.aio.secure_channel(address, credentials, options=options))


async def test_a_server_that_is_none_of_ours_is_not_believed(certificates: Path, tmp_path: Path) -> None:
    other = _make(tmp_path)
    tls.use(_security(other))
    async with _server() as address:
        tls.use(_security(certificates))
        assert await _refused(connect(address))


async def test_a_certificate_of_the_authority_with_another_name_is_not_believed(certificates: Path) -> None:
    """What the edge shows to clients is not enough to pose as a service, whoever signed it."""
    tls.use(_security(certificates, "tls", "ca"))
    async with _server() as address:
        assert await _refused(connect(address))


async def _stream(address: str) -> MillraceError | None:
    """How a stream ends; None once it works."""
    talk = Talk(address, "Echo")
    talk.outbox.put(b"x")
    try:
        assert await talk.take() == b"x"
    except MillraceError as error:
        return error
    finally:
        talk.task.cancel()
        await asyncio.gather(talk.task, return_exceptions=True)
    return None


async def test_streams_need_the_same_certificates(certificates: Path, tmp_path: Path) -> None:
    ours, theirs = _security(certificates), _security(_make(tmp_path))
    tls.use(ours)
    server = GrpcServer("127.0.0.1:0")
    server.add(register, Streams(), STREAMS)
    await server.start()
    address = f"127.0.0.1:{server.port}"
    assert await _stream(address) is None
    # Clients with a certificate of another authority, of the edge's, and without TLS.
    for security in (theirs, _security(certificates, "tls", "ca"), SecurityConfig()):
        tls.use(security)
        assert await _stream(address) is not None
    tls.use(ours)
    assert await _stream(address) is None
    await server.stop(0)


@pytest.mark.parametrize("missing", ["tls_certificate", "tls_key", "tls_authority"])
def test_half_a_set_is_an_error_that_names_what_is_missing(certificates: Path, missing: str) -> None:
    fields = {
        name: getattr(_security(certificates), name)
        for name in ("tls_certificate", "tls_key", "tls_authority")
    }
    with pytest.raises(ConfigError, match=f"security.{missing}: .*make certificates"):
        tls.load(SecurityConfig(**{**fields, missing: ""}))
    with pytest.raises(ConfigError, match=f"security.{missing}: .*No such file"):
        tls.load(SecurityConfig(**{**fields, missing: "/nowhere.pem"}))


def test_files_that_do_not_fit_are_an_error_before_anything_listens(certificates: Path) -> None:
    security = SecurityConfig(
        tls_certificate=str(certificates / "internal.crt"),
        tls_key=str(certificates / "tls.key"),
        tls_authority=str(certificates / "internal-ca.crt"),
    )
    with pytest.raises(ConfigError, match="cannot be used"):
        tls.load(security)


def test_keys_are_readable_by_their_owner_and_group_only(certificates: Path) -> None:
    for key in certificates.glob("*.key"):
        assert key.stat().st_mode & 0o027 == 0, key


async def test_the_health_check_of_containers_asks_with_the_certificates(certificates: Path) -> None:
    security = _security(certificates)
    tls.use(security)
    variables = {
        f"MILLRACE_SECURITY__{name.upper()}": getattr(security, name)
        for name in ("tls_certificate", "tls_key", "tls_authority")
    }
    async with _server() as address:
        for environment, expected in ((variables, 0), ({}, 1)):
            check = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "runtime.healthcheck", address),
                env={"PATH": "/usr/bin:/bin", **environment},
                cwd=_SCRIPT.parents[2],
                stderr=asyncio.subprocess.DEVNULL,
            )
            assert await check.wait() == expected


def test_the_http_face_asks_for_a_certificate_too(certificates: Path) -> None:
    secure = tls.load(_security(certificates))
    assert secure is not None
    context = secure.server_context()
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
