"""The rendered configuration is one that Envoy accepts, in every profile and with every option."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.envoy.bootstrap import IDENTITY_HEADERS, PROFILES, render
from runtime.errors import ConfigError
from services.supervisor.edge import envoy_binary

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "traced": {"observability": {"otlp_endpoint": "http://collector:4317"}},
    "several gateways": {
        "envoy": {"gateway_grpc": ["127.0.0.1:1", "127.0.0.1:2"], "gateway_http": ["[::1]:3"]}
    },
    "metrics and file log": {"envoy": {"metrics_listen": "127.0.0.1:9902", "access_log": "/dev/null"}},
    "keys by URL": {"keys": {"jwt": {"issuer": "https://id", "jwks_url": "https://id.example/keys"}}},
}


def validate(text: str, folder: Path) -> None:
    path = folder / "envoy.yaml"
    path.write_text(text)
    command = [str(envoy_binary()), "--mode", "validate", "-c", str(path), "--use-dynamic-base-id"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "deprecated" not in result.stderr.lower()


@pytest.mark.parametrize("profile", sorted(PROFILES))
@pytest.mark.parametrize("option", OPTIONS)
def test_envoy_accepts_it(profile: Any, option: str, tmp_path: Path) -> None:
    validate(render(OPTIONS[option], profile), tmp_path)


@pytest.mark.parametrize(
    "endpoint", ["http://collector:4318", "https://collector.example", "https://collector.example:4317"]
)
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_spans_go_where_the_standards_variables_say(
    endpoint: str, protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=secret")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    decide = endpoint.startswith("https")
    text = render({"envoy": {"trace_sampling_percent": 50.0, "clients_decide_traces": decide}})
    validate(text, tmp_path)
    manager = yaml.safe_load(text)["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
    tracing = manager["typed_config"]["tracing"]
    assert tracing["random_sampling"]["value"] == 100.0
    sampler = tracing["provider"]["typed_config"]["sampler"]
    assert sampler["name"].endswith("parent_based") is decide
    by_share = sampler["typed_config"]["wrapped_sampler"] if decide else sampler
    assert by_share["typed_config"]["sampling_percentage"] == {
        "numerator": 125_000,
        "denominator": "MILLION",
    }
    assert ("grpc_service" in tracing["provider"]["typed_config"]) == (protocol == "grpc")
    assert "secret" in text
    assert ("UpstreamTlsContext" in text) == endpoint.startswith("https")


def test_names_are_looked_up_in_both_families() -> None:
    tables = OPTIONS["keys by URL"] | {"observability": {"otlp_endpoint": "http://localhost:4317"}}
    clusters = {
        cluster["name"]: cluster.get("cluster_type", {}).get("typed_config", {})
        for cluster in yaml.safe_load(render(tables, "compose"))["static_resources"]["clusters"]
    }
    for name in ("traces", "jwks"):
        # Where localhost is ::1 as well, a receiver on 127.0.0.1 alone is still found.
        assert clusters[name]["dns_lookup_family"] == "ALL"
        assert clusters[name]["all_addresses_in_single_endpoint"]
    assert clusters["gateway_http"]["dns_lookup_family"] == "V4_PREFERRED"


@pytest.mark.parametrize("variable", ["OTEL_SDK_DISABLED=true", "OTEL_TRACES_EXPORTER=none"])
def test_envoy_makes_no_spans_where_services_make_none(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "OpenTelemetryConfig" in render(OPTIONS["traced"])
    name, value = variable.split("=")
    monkeypatch.setenv(name, value)
    assert "OpenTelemetryConfig" not in render(OPTIONS["traced"])


def test_containers_listen_to_the_world_and_administrators_do_not() -> None:
    for profile in ("compose", "kubernetes"):
        config = yaml.safe_load(render({}, profile))
        assert config["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"
        public = config["static_resources"]["listeners"][0]["address"]["socket_address"]
        assert (public["address"], public["port_value"]) == ("0.0.0.0", 8080)


def test_configured_values_win_over_the_profile() -> None:
    config = yaml.safe_load(render({"envoy": {"gateway_http": ["edge-gateway:9"]}}, "compose"))
    endpoint = config["static_resources"]["clusters"][3]["load_assignment"]["endpoints"][0]["lb_endpoints"][0]
    assert endpoint["endpoint"]["address"]["socket_address"] == {"address": "edge-gateway", "port_value": 9}


def test_every_identity_header_is_dropped_before_any_filter() -> None:
    manager = yaml.safe_load(render({}))["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
    (mutation,) = manager["typed_config"]["early_header_mutation_extensions"]
    dropped = {step.get("remove") for step in mutation["typed_config"]["mutations"]}
    assert set(IDENTITY_HEADERS) <= dropped


def test_command_prints_it_and_names_what_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gateway.envoy", "--profile", "compose", "--config"]
    good = tmp_path / "good.toml"
    good.write_text("[envoy]\nmax_requests = 7\n")
    result = subprocess.run([*command, str(good)], capture_output=True, text=True, check=True)
    breakers = yaml.safe_load(result.stdout)["static_resources"]["clusters"][0]["circuit_breakers"]
    assert breakers["thresholds"][0]["max_requests"] == 7
    bad = tmp_path / "bad.toml"
    bad.write_text("[envoy]\nlisten_on = 'x'\n")
    result = subprocess.run([*command, str(bad)], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "listen_on" in result.stderr


def test_development_key_cannot_leave_the_machine() -> None:
    tables = {"keys": {"development_hash": "sha256:" + "0" * 64}}
    render(tables, "local")
    with pytest.raises(ConfigError, match=r"keys\.development_hash"):
        render(tables, "compose")
