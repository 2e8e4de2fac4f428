"""How a stack starts: with several processes of a kind, open to the network, or not at all."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import openai
import pytest

from services.supervisor.config import BUNDLED_MODEL
from tests.e2e.stack import CONFIG, eventually, run_up, running_stack
from tests.e2e.streaming import NUM_TOKENS, stream_tokens


def test_healthy_means_that_the_edge_knows_every_gateway(tmp_path: Path) -> None:
    with running_stack(tmp_path, "--simulated", "--gateways", "3") as stack:
        (admin,) = stack.addresses("envoy", "admin")
        page = httpx.get(f"http://{admin}/clusters", params={"format": "json"}, trust_env=False).json()
        healthy = {
            each["name"]: [host["health_status"] for host in each["host_statuses"]]
            for each in page["cluster_statuses"]
            if each["name"].startswith("gateway_")
        }
        assert len(healthy) >= 2
        assert all(found == [{"eds_health_status": "HEALTHY"}] * 3 for found in healthy.values()), healthy


def test_several_engines_and_gateways(tmp_path: Path) -> None:
    with running_stack(tmp_path, "--simulated", "--engines", "2", "--gateways", "2") as stack:
        assert len(stack.addresses("engine", "grpc")) == len(stack.addresses("gateway", "grpc")) == 2
        results = [stream_tokens(stack, threading.Event()) for _ in range(4)]
        assert results == [(NUM_TOKENS, "length")] * 4
        stack.assert_nothing_leaked()


def test_open_to_the_network_there_is_no_development_key(tmp_path: Path) -> None:
    with running_stack(tmp_path, "--simulated", "--host", "0.0.0.0") as stack:
        assert "mr-dev-local" not in stack.output.read_text()
        with pytest.raises(openai.AuthenticationError):
            stack.openai("mr-dev-local").models.list()
        created = subprocess.run(
            [sys.executable, "-m", "services.cli", "keys", "create", "--tenant", "development"],
            env={**os.environ, "MILLRACE_STATE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        key = created.stdout.split()[0]

        def accepted() -> bool:
            try:
                return bool(stack.openai(key).models.list().data)
            except openai.AuthenticationError:
                return False

        assert eventually(accepted)


# --- refusals before anything starts ----------------------------------------------------------------------


def test_port_in_use_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run_up(tmp_path, "--port", str(taken.getsockname()[1]), "--model", str(BUNDLED_MODEL))
    assert result.returncode == 2
    assert "--port" in result.stdout + result.stderr


def test_mistake_in_a_services_configuration_is_one_clear_message(tmp_path: Path) -> None:
    config = tmp_path / "bad.toml"
    config.write_text(CONFIG.replace("[gateway]", "[engine]\nnum_thread = 1\n[gateway]"))
    result = run_up(tmp_path, "--port", "0", "--config", str(config), "--model", str(BUNDLED_MODEL))
    assert result.returncode == 2
    assert (result.stdout + result.stderr).splitlines() == [
        "millrace: engine.num_thread: Object contains unknown field `num_thread`"
    ]
