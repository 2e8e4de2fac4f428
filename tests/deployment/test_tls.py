"""TLS at the edge, with the certificates that the script makes, through the real Envoy."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.envoy.bootstrap import render
from runtime.errors import ConfigError
from services.supervisor.edge import envoy_binary
from tests.deployment.containerfile import REPOSITORY

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    script = REPOSITORY / "services/envoy/make-certificates.sh"
    subprocess.run(["/bin/sh", str(script), str(folder)], check=True, capture_output=True)
    assert (folder / "tls.key").stat().st_mode & 0o007 == 0
    return folder


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _render(folder: Path, **envoy: Any) -> tuple[str, int]:
    port = _free_port()
    table = {
        "listen": f"127.0.0.1:{port}",
        "admin": f"127.0.0.1:{_free_port()}",
        "tls_certificate": str(folder / "tls.crt"),
        "tls_key": str(folder / "tls.key"),
        **envoy,
    }
    return render({"envoy": table, "security": {"context_secret": "0123456789abcdef"}}), port


class Edge:
    """A running Envoy without a gateway behind it; every request is answered by Envoy itself."""

    def __init__(self, config: str, port: int, folder: Path) -> None:
        path = folder / f"envoy-{port}.yaml"
        path.write_text(config)
        command = [
            str(envoy_binary()),
            "--config-path",
            str(path),
            "--use-dynamic-base-id",
            "--concurrency",
            "1",
        ]
        self._process = subprocess.Popen([*command, "--log-level", "off"], stdout=subprocess.DEVNULL)
        self.port = port

    def ask(self, context: ssl.SSLContext) -> tuple[str, bytes]:
        """(protocol chosen by ALPN, first line of the answer to an HTTP/1.1 request)."""
        while True:
            try:
                plain = socket.create_connection(("127.0.0.1", self.port), timeout=10)
                break
            except ConnectionRefusedError:
                assert self._process.poll() is None
                time.sleep(0.05)
        with plain, context.wrap_socket(plain, server_hostname="localhost") as secure:
            chosen = secure.selected_alpn_protocol() or ""
            secure.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            return chosen, secure.recv(65536).split(b"\r\n")[0]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


@pytest.fixture
def edge(certificates: Path, tmp_path: Path) -> Iterator[Edge]:
    edge = Edge(*_render(certificates), tmp_path)
    yield edge
    edge.close()


def _trusting(certificates: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificates / "ca.crt"))


def test_clients_speak_tls_to_the_edge(certificates: Path, edge: Edge) -> None:
    context = _trusting(certificates)
    context.set_alpn_protocols(["http/1.1"])
    chosen, line = edge.ask(context)
    assert chosen == "http/1.1"
    assert line.startswith(b"HTTP/1.1 "), line
    context = _trusting(certificates)
    context.set_alpn_protocols(["h2", "http/1.1"])
    assert edge.ask(context)[0] == "h2"


def test_clients_that_do_not_trust_the_authority_are_not_fooled(edge: Edge) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        edge.ask(ssl.create_default_context())


def test_old_protocol_versions_are_refused(certificates: Path, edge: Edge) -> None:
    context = _trusting(certificates)
    # The names of the old versions are deprecated, which is the point.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        edge.ask(context)


def test_a_client_certificate_can_be_demanded(certificates: Path, tmp_path: Path) -> None:
    with closing(Edge(*_render(certificates, tls_client_ca=str(certificates / "ca.crt")), tmp_path)) as edge:
        context = _trusting(certificates)
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            # With TLS 1.3 the refusal comes with the first read.
            raise_unless_answered(edge.ask(context))
        context.load_cert_chain(certificates / "tls.crt", certificates / "tls.key")
        assert edge.ask(context)[1].startswith(b"HTTP/1.1 ")


def raise_unless_answered(answer: tuple[str, bytes]) -> None:
    """An empty answer is a connection that was closed."""
    if not answer[1]:
        raise ConnectionResetError


@pytest.mark.parametrize(
    ("given", "missing"), [("tls_certificate", "tls_key"), ("tls_key", "tls_certificate")]
)
def test_half_a_pair_is_an_error_that_names_the_other_half(
    certificates: Path, given: str, missing: str
) -> None:
    table = {given: str(certificates / "tls.crt")}
    with pytest.raises(ConfigError, match=rf"envoy\.{missing}"):
        render({"envoy": table, "security": {"context_secret": "0123456789abcdef"}})


def test_the_rendered_configuration_holds_no_key(certificates: Path) -> None:
    config, _ = _render(certificates)
    assert "PRIVATE KEY" not in config
    (chain,) = yaml.safe_load(config)["static_resources"]["listeners"][0]["filter_chains"]
    assert chain["transport_socket"]["name"] == "envoy.transport_sockets.tls"
