"""How a stack starts: with several processes of a kind, open to the network, or not at all."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import httpx
import openai
import pytest

from observability.analysis.decode import decode
from observability.emit import names
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


def test_questions_about_health_leave_no_traces(tmp_path: Path) -> None:
    with running_stack(tmp_path, "--simulated") as stack:
        response = stack.openai().chat.completions.with_raw_response.create(
            model=stack.model, messages=[{"role": "user", "content": "Hello!"}], max_tokens=4
        )
        request_id = str(response.headers["x-request-id"])
        # What the supervisor and Envoy have asked until then has arrived by now, if it was traced.
        (trace_id,) = {span.trace_id for span in stack.trace(request_id, [names.ENGINE_REQUEST])}
        with closing(sqlite3.connect(stack.state.trace_store)) as store:
            messages = store.execute("SELECT data FROM messages").fetchall()
        assert {span.trace_id for (data,) in messages for span in decode(data)} == {trace_id}


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


def test_template_that_does_not_parse_is_one_clear_line(tmp_path: Path) -> None:
    template = tmp_path / "broken.jinja"
    template.write_text("{{ messages }}\n{% if %}")
    model = ("--simulated", "--model", str(BUNDLED_MODEL))
    result = run_up(tmp_path, "--port", "0", *model, "--chat-template", str(template))
    assert result.returncode == 2
    assert (result.stdout + result.stderr).splitlines()[-1] == (
        "millrace: tokenizer: chat template 'default', line 2: Expected an expression, got 'end of statement "
        "block'; correct it, or give another one with --chat-template FILE (model.chat_template)"
    )
