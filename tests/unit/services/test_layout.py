"""Which processes a command line and a configuration lead to."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.config import read_tables
from runtime.errors import ConfigError
from services.compiler import find_compiler
from services.supervisor import checkpoint
from services.supervisor.checks import check_tables
from services.supervisor.config import DEFAULT_CONFIG, Options
from services.supervisor.layout import Layout, plan_layout
from services.supervisor.ports import can_bind, free_ports, release
from services.supervisor.report import summary, usage_examples


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    return directory


_TEXTS = ("chat_template", "tool_call_parser", "reasoning_parser")


def plan(tmp_path: Path, model: Path, config: str = "", **options: object) -> Layout:
    file = tmp_path / "millrace.toml"
    file.write_text(config)
    chosen = {"model": (str(model),), "port": 0, **options}
    return plan_layout(Options(config=file, **chosen), tmp_path, {})  # type: ignore[arg-type]


def test_every_process_once_with_its_own_addresses(tmp_path: Path, model: Path) -> None:
    layout = plan(tmp_path, model, engines=2, gateways=2)
    names = [spec.name for spec in layout.processes]
    assert names == [
        *("collector", "tokenizer", "engine-0", "engine-1", "gateway-0", "gateway-1", "envoy"),
    ]
    addresses = [address for each in layout.addresses.values() for address in each.values()]
    assert len(set(addresses)) == len(addresses)
    engines = {layout.addresses[f"engine-{index}"]["grpc"] for index in range(2)}
    discovery = json.loads(layout.environment["MILLRACE_GATEWAY__DISCOVERY"])
    assert set(Path(discovery.removeprefix("file:")).read_text().split()) == engines


def test_environment_is_configuration_that_services_accept(tmp_path: Path, model: Path) -> None:
    layout = plan(tmp_path, model, dtype="bfloat16", quantize="int8", simulated=True)
    for spec in layout.processes:
        tables = read_tables(layout.config, {**layout.environment, **spec.environment})
        assert tables["model"]["path"] == str(model)
        assert tables["model"]["name"] == "tiny"
    engine = read_tables(layout.config, {**layout.environment, **layout.engines[0].environment})["engine"]
    assert engine["simulated"] is True
    assert engine["dtype"] == "bfloat16"
    assert engine["quantize"] == "int8"
    assert engine["listen"] == layout.addresses["engine-0"]["grpc"]


def test_numbers_of_processes_come_from_the_file_unless_given(tmp_path: Path, model: Path) -> None:
    config = "[supervisor]\nengines = 3\ngateways = 2\n"
    assert len(plan(tmp_path, model, config).engines) == 3
    assert len(plan(tmp_path, model, config, engines=1).engines) == 1
    assert len(plan(tmp_path, model, config).gateways) == 2


def test_of_a_model_s_engines_some_compute_prompts(tmp_path: Path, model: Path) -> None:
    layout = plan(tmp_path, model, "[supervisor]\nengines = 3\nprefill_engines = 1\n")
    tables = [
        read_tables(layout.config, {**layout.environment, **each.environment}) for each in layout.engines
    ]
    assert [each["engine"]["role"] for each in tables] == ["prefill", "decode", "decode"]
    with pytest.raises(ConfigError, match=r"supervisor\.prefill_engines = 1: .* has 1 engines"):
        plan(tmp_path, model, "[supervisor]\nprefill_engines = 1\n")


def test_configured_values_are_left_alone(tmp_path: Path, model: Path) -> None:
    config = """
    [security]
    context_secret = "a secret of the operator"
    [observability]
    otlp_endpoint = "collector:4317"
    [engine]
    num_threads = 7
    [keys]
    store = "keys.db"
    """
    layout = plan(tmp_path, model, config)
    assert layout.collector is None
    assert layout.trace_store == ""
    tables = read_tables(layout.config, {**layout.environment, **layout.engines[0].environment})
    assert tables["security"]["context_secret"] == "a secret of the operator"
    assert tables["observability"]["otlp_endpoint"] == "collector:4317"
    assert tables["engine"]["num_threads"] == 7
    assert tables["keys"]["store"] == "keys.db"


def test_place_that_is_emptied_stays_empty(tmp_path: Path, model: Path) -> None:
    layout = plan(tmp_path, model, '[keys]\nstore = ""\n[gateway.ledger]\nurl = ""\n')
    tables = read_tables(layout.config, layout.environment)
    assert (tables["keys"]["store"], tables["gateway"]["ledger"]["url"]) == ("", "")


def test_secrets_differ_between_stacks(tmp_path: Path, model: Path) -> None:
    variable = "MILLRACE_SECURITY__CONTEXT_SECRET"
    first, second = plan(tmp_path, model), plan(tmp_path, model)
    assert first.environment[variable] != second.environment[variable]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_development_key_on_loopback(tmp_path: Path, model: Path, host: str) -> None:
    if not can_bind(host, 0):
        pytest.skip(f"{host} does not exist on this machine")
    layout = plan(tmp_path, model, host=host)
    assert layout.api_key == "mr-dev-local"
    digest = hashlib.sha256(b"mr-dev-local").hexdigest()
    assert json.loads(layout.environment["MILLRACE_KEYS__DEVELOPMENT_HASH"]) == f"sha256:{digest}"


def test_no_development_key_for_the_world(tmp_path: Path, model: Path) -> None:
    layout = plan(tmp_path, model, host="0.0.0.0")
    assert layout.api_key == ""
    assert layout.address == layout.edge.replace("0.0.0.0", "127.0.0.1")
    assert "MILLRACE_KEYS__DEVELOPMENT_HASH" not in layout.environment
    assert "mr-dev-local" not in usage_examples(layout.edge, layout.api_key, layout.model_name)


def test_an_edge_with_a_certificate_is_named_by_https(tmp_path: Path, model: Path) -> None:
    config = '[envoy]\ntls_certificate = "tls.crt"\ntls_key = "tls.key"\n'
    shown = summary(plan(tmp_path, model, config), "logs", {})
    layout = plan(tmp_path, model)
    assert "https://" in shown
    assert not re.findall(r"http://\S+/v1\b", shown)
    assert "https://" not in summary(layout, "logs", {})


def test_development_key_can_be_chosen(tmp_path: Path, model: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    options = Options(config=tmp_path / "empty.toml", model=(str(model),), port=0)
    assert plan_layout(options, tmp_path, {"MILLRACE_DEV_KEY": "mine"}).api_key == "mine"


def test_port_in_use_names_the_option(tmp_path: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}.*Choose another one with --port"):
            plan(tmp_path, model, port=port)


def test_address_that_the_machine_has_not_names_the_host(tmp_path: Path, model: Path) -> None:
    for port in (0, 8080):
        with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1: this machine has no such address"):
            plan(tmp_path, model, host="192.0.2.1", port=port)


def test_name_and_context_of_the_command_line_win(tmp_path: Path, model: Path) -> None:
    file = '[model]\nname = "file"\n[engine]\nmax_model_len = 4096\n'
    layout = plan(tmp_path, model, file, served_model_name="asked", max_model_len=512)
    assert layout.model_name == "asked"
    engine = read_tables(layout.config, {**layout.environment, **layout.engines[0].environment})["engine"]
    assert engine["max_model_len"] == 512


def test_name_of_the_environment_holds_for_the_model_of_the_command_line(tmp_path: Path, model: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    options = Options(config=tmp_path / "empty.toml", model=(str(model),), port=0)
    layout = plan_layout(options, tmp_path, {"MILLRACE_MODEL__NAME": "mine"})
    assert layout.model_name == "mine"
    assert read_tables(None, layout.environment)["model"]["name"] == "mine"


def test_template_and_parsers_of_the_file_are_those_of_its_checkpoint(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "file.toml"
    file.write_text(
        f'[model]\npath = "{model}"\ntool_call_parser = "hermes"\nreasoning_parser = "think"\nname = "a"\n'
    )

    def planned(environ: dict[str, str] | None = None, **options: Any) -> dict[str, str]:
        layout = plan_layout(Options(config=file, port=0, **options), tmp_path, environ or {})
        return {**dict.fromkeys(_TEXTS, ""), **read_tables(None, layout.environment)["model"]}

    own, other = (
        planned(),
        planned(model=(str(model),), tool_call_parser="llama3", chat_template=Path("t.jinja")),
    )
    assert (own["tool_call_parser"], own["reasoning_parser"], own["chat_template"]) == ("hermes", "think", "")
    assert (other["tool_call_parser"], other["reasoning_parser"]) == ("llama3", "")
    assert other["chat_template"] == "t.jinja"
    named = planned({"MILLRACE_MODEL__REASONING_PARSER": "think"}, model=(str(model),))
    assert (named["tool_call_parser"], named["reasoning_parser"]) == ("", "think")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"chat_template": "/no/such.jinja"},
            r"model\.chat_template: /no/such\.jinja is no file; give that of a Jinja template",
        ),
        (
            {"tool_call_parser": "pythonic"},
            r"model\.tool_call_parser: .*'pythonic'; expected one of command, .*, hermes, .*, qwen_xml$",
        ),
        ({"reasoning_parser": "x"}, r"model\.reasoning_parser: .*'x'; expected one of command, .*, think$"),
    ],
)
def test_template_or_parser_that_is_not_known_is_refused_before_anything_starts(
    options: dict[str, object], said: str, tmp_path: Path, model: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_tables(plan(tmp_path, model, simulated=True, **options), {})


def test_metrics_ports_are_those_of_the_file(tmp_path: Path, model: Path) -> None:
    first = next(port for port in free_ports(20) if all(can_bind("127.0.0.1", port + i) for i in range(3)))
    config = f"[supervisor]\nmetrics_port = {first}\n"
    layout = plan(tmp_path, model, config)
    found = [each["metrics"] for each in layout.addresses.values() if "metrics" in each]
    assert found == [f"127.0.0.1:{first + index}" for index in range(3)]
    with (
        socket.create_server(("127.0.0.1", first + 1)),
        pytest.raises(ConfigError, match=f"supervisor.metrics_port: another program uses .*:{first + 1}"),
    ):
        plan(tmp_path, model, config)


def test_python_example_reads_the_key_where_there_is_none() -> None:
    assert 'api_key=os.environ["MILLRACE_API_KEY"]' in usage_examples("h:1", "", "m")
    assert 'api_key="mr-dev"' in usage_examples("h:1", "mr-dev", "m")


def test_checkpoint_that_no_family_reads_is_refused_before_anything_starts(
    tmp_path: Path, model: Path
) -> None:
    (model / "config.json").write_text('{"architectures": ["NoSuchForCausalLM"]}')
    with pytest.raises(ConfigError, match="architecture NoSuchForCausalLM is not supported"):
        check_tables(plan(tmp_path, model), {})
    check_tables(plan(tmp_path, model, simulated=True), {})


def test_unknown_key_is_named(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match="engins"):
        plan(tmp_path, model, "[supervisor]\nengins = 2\n")


def test_free_ports_are_different_and_free() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(can_bind("127.0.0.1", port) for port in ports)


def test_a_port_that_is_held_is_given_to_nobody_else_until_its_holder_lets_it_go() -> None:
    (port,) = free_ports(1)
    every_other = {*range(20_000, 32_000)} - {port}
    # Neither before its process listens, nor while it does, nor after that has ended.
    with pytest.raises(ConfigError, match="no 1 free ports"):
        free_ports(1, beside=every_other)
    for _ in range(2):
        with socket.create_server(("127.0.0.1", port)), pytest.raises(ConfigError):
            free_ports(1, beside=every_other)
        with pytest.raises(ConfigError):
            free_ports(1, beside=every_other)
    release([f"127.0.0.1:{port}"])
    # Another process takes it, as another stack would.
    others = f"{{*range(20_000, 32_000)}} - {{{port}}}"
    command = f"from services.supervisor.ports import free_ports; print(free_ports(1, beside={others}))"
    assert subprocess.check_output([sys.executable, "-c", command], text=True) == f"[{port}]\n"


def test_missing_model_says_what_was_tried() -> None:
    place = str(checkpoint.ROOT / "nowhere")
    with pytest.raises(ConfigError, match=r"no such directory \(tried .*nowhere.*hub id") as refusal:
        checkpoint.resolve("nowhere")
    assert str(refusal.value).count(place) == 1


def test_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        checkpoint.resolve(str(tmp_path))


def test_a_machine_without_a_compiler_is_warned_of_the_slow_path(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    environ = {"PATH": str(folder)}
    options = Options(config=None, model=(str(model),), port=0)
    (warning,) = plan_layout(options, tmp_path, environ).warnings
    assert "torch computes instead" in warning
    simulated = Options(config=None, model=(str(model),), port=0, simulated=True)
    assert not plan_layout(simulated, tmp_path, environ).warnings
    for variables, name in (({}, "clang++"), ({"CXX": "my-c++ -O2"}, "my-c++")):
        compiler = folder / name
        compiler.touch(mode=0o755)
        assert find_compiler({**environ, **variables}) == str(compiler)
        assert not plan_layout(options, tmp_path, {**environ, **variables}).warnings
        compiler.unlink()


def test_several_gateways_without_a_shared_store_are_warned_about(tmp_path: Path, model: Path) -> None:
    assert not plan(tmp_path, model).warnings
    (warning,) = plan(tmp_path, model, gateways=3).warnings
    assert "gateway.limits.store" in warning
    assert "3 times its limits" in warning
    shared = '[gateway.limits]\nstore = "redis://127.0.0.1:6379/0"\n'
    assert not plan(tmp_path, model, shared, gateways=3).warnings


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ("[engine]\nnum_thread = 1\n", "engine.num_thread"),
        ("[engine.scheduler]\nmax_num_seqs = 0\n", "engine.scheduler.max_num_seqs"),
        ("[engine.cache]\nblock_size = 'x'\n", "engine.cache.block_size"),
        ("[tokenizer]\nlisen = 'x'\n", "tokenizer.lisen"),
        ("[tokenizer.compile]\nworkers = 0\n", "tokenizer.compile.workers"),
        ("[observability]\nsample_ratio = 2\n", "observability.sample_ratio"),
        ("[gateway.limits]\nstore = 'http://x'\n", "gateway.limits.store"),
        ("[tiers.batch]\nprioritty = 1\n", "tiers.batch.prioritty"),
        ("[tenants.a]\ntier = 'gold'\n", "tenants.a.tier"),
        ("[envoy]\nconcurrency = -1\n", "envoy.concurrency"),
        ("[security]\ncontext_secret = 'short'\n", "security.context_secret"),
    ],
)
def test_a_mistake_in_any_table_is_found_before_anything_starts(
    tmp_path: Path, model: Path, config: str, key: str
) -> None:
    layout = plan(tmp_path, model, config)
    with pytest.raises(ConfigError) as raised:
        check_tables(layout, {})
    assert str(raised.value).startswith(key)
    assert "\n" not in str(raised.value)


def test_variables_of_the_standard_are_checked_before_anything_starts(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "https://collector")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", "/no/such.pem")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_CERTIFICATE"):
        check_tables(plan(tmp_path, model, "", simulated=True), {})


def test_the_default_configuration_is_accepted(tmp_path: Path, model: Path) -> None:
    check_tables(plan(tmp_path, model, DEFAULT_CONFIG.read_text(), simulated=True), {})


@pytest.mark.parametrize(
    ("config", "simulated", "expected"),
    [
        ('[engine]\ndevice = "cpu"', False, 5),
        ('[engine]\ndevice = "cpu"\n[supervisor]\nengine_niceness = 0', False, 0),
        ('[engine]\ndevice = "cpu"', True, 0),
        ('[engine]\ndevice = "cuda"', False, 0),
    ],
)
def test_engines_on_processors_give_way_to_all_others(
    tmp_path: Path, model: Path, config: str, simulated: bool, expected: int
) -> None:
    layout = plan(tmp_path, model, config, simulated=simulated)
    told = {spec.name: spec.niceness for spec in layout.processes}
    assert {name: each for name, each in told.items() if each} == ({"engine-0": expected} if expected else {})


@pytest.mark.parametrize(
    ("config", "simulated", "expected"),
    [
        ("", True, True),
        # Its threads would be waited for at every hop.
        ("", False, False),
        ('[engine]\ndevice = "cpu"', False, False),
        # Foreign load would be waited for by what feeds the device.
        ('[engine]\ndevice = "cuda"', False, False),
        ('[engine]\ndevice = "cuda"\n[supervisor]\nscheduling = "batch"', False, True),
        ('[supervisor]\nscheduling = "normal"', True, False),
        ('[supervisor]\nscheduling = "batch"', False, True),
    ],
)
def test_processes_do_not_interrupt_one_another_with_simulated_engines(
    tmp_path: Path, model: Path, config: str, simulated: bool, expected: bool
) -> None:
    layout = plan(tmp_path, model, config, simulated=simulated)
    assert {spec.is_batch for spec in layout.processes} == {expected}
