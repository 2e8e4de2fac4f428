"""Starts every container of the compose file and of the manifests by its own command, and uses what runs."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deployment import kustomize
from tests.deployment.composition import environment, load
from tests.deployment.containerfile import REPOSITORY, parse
from tests.deployment.runtime import (
    Confinement,
    Container,
    Image,
    Network,
    can_confine,
    can_switch_user,
    give_to_user,
    open_to_all,
)

pytestmark = pytest.mark.e2e

_KEY = {"authorization": "Bearer mr-dev-local"}
_MODEL = "millrace-nano"


class Deployment:
    """Containers that run on one network with shared volumes."""

    def __init__(self, root: Path, hosts: list[str]) -> None:
        self.root = root
        self.network = Network(hosts)
        self.as_user = can_switch_user()
        # Without it the rest is tested all the same, on a root file system that the user cannot write to.
        self.read_only = can_confine()
        self.images: dict[str, Image] = {}
        self.running: dict[str, Container] = {}
        # Paths inside containers to folders of this machine.
        self.mounts: dict[str, Path] = {}

    def image(self, dockerfile: str) -> Image:
        """The image, laid out once."""
        if dockerfile not in self.images:
            folder = self.root / "images" / dockerfile.replace("/", "-")
            self.images[dockerfile] = Image(parse(REPOSITORY / dockerfile), folder)
            open_to_all(folder)
        return self.images[dockerfile]

    def mount(self, path: str, name: str) -> Path:
        """A volume that the containers' user may write to."""
        folder = self.root / "volumes" / name
        give_to_user(folder, as_user=self.as_user or self.read_only)
        self.mounts[path] = folder
        return folder

    def translate(self, text: str, here: str, image: Image | None) -> str:
        """Text of a container's command or environment as it has to be on this machine."""
        for path, folder in sorted(self.mounts.items(), key=lambda item: -len(item[0])):
            text = text.replace(path, str(folder))
        if image is not None:
            text = image.locate(text)
        # Envoy's configuration is rendered with the deployment's own addresses and moved as a whole.
        return text if here == "configure" else self.network.translate(text, here)

    def start(
        self,
        name: str,
        dockerfile: str,
        argv: list[str],
        variables: Mapping[str, str],
        writable: Sequence[str],
    ) -> Container:
        """Starts a container of one of our images; of its paths only `writable` can be changed."""
        image = self.image(dockerfile)
        merged = {**image.dockerfile.environment(), **variables}
        translated = {key: self.translate(value, name, image) for key, value in merged.items()}
        translated["PATH"] = image.environment()["PATH"]
        words = [self.translate(word, name, image) for word in argv]
        program = image.root / "opt/venv/bin" / words[0]
        if program.exists():
            words[0] = str(program)
        confinement = self._confine(name, writable) if self.read_only else None
        folder = image.root / "app"
        return self.launch(name, words, translated, folder, as_user=self.as_user, confinement=confinement)

    def _confine(self, name: str, writable: Sequence[str]) -> Confinement:
        folders = tuple(self.mounts[path] for path in writable if path != "/tmp")
        return Confinement(self.root, self.root / "scratch" / name, "/tmp" in writable, folders)

    def launch(
        self,
        name: str,
        argv: list[str],
        variables: Mapping[str, str],
        folder: Path,
        *,
        as_user: bool = False,
        confinement: Confinement | None = None,
    ) -> Container:
        """Starts a command of this machine."""
        logs = self.root / "logs"
        logs.mkdir(exist_ok=True)
        log = logs / f"{name}.log"
        container = Container(argv, variables, folder, log, as_user=as_user, confinement=confinement)
        self.running[name] = container
        return container

    def check_health(self, name: str, dockerfile: str) -> None:
        """Runs the image's own health check against the running container."""
        image = self.image(dockerfile)
        words = [self.translate(word, name, image) for word in image.dockerfile.health_command()]
        words[0] = str(image.root / "opt/venv/bin" / words[0])
        checked = subprocess.run(
            words,
            env=image.environment(),
            cwd=image.root / "app",
            capture_output=True,
            text=True,
            check=False,
        )
        assert checked.returncode == 0, f"{name}: {checked.stderr}"

    def start_envoy(self, argv: list[str], config: Path) -> int:
        """Starts Envoy with a rendered configuration; gives the port that stands for 8080."""
        document = yaml.safe_load(config.read_text())
        self._move_addresses(document)
        moved = self.root / "envoy-moved.yaml"
        moved.write_text(yaml.safe_dump(document))
        index = argv.index("--config-path") + 1
        assert argv[index] == "/etc/envoy/edge/envoy.yaml"
        binary = _envoy_binary()
        words = [binary, *argv[1:index], str(moved), *argv[index + 1 :], "--concurrency", "1"]
        self.launch("envoy", words, {}, self.root)
        return self.network.port("envoy", 8080)

    def _move_addresses(self, value: Any) -> None:
        if isinstance(value, list):
            for item in value:
                self._move_addresses(item)
        elif isinstance(value, dict):
            address = value.get("socket_address")
            if address:
                host = address["address"]
                here = "envoy" if host[0].isdigit() else host
                address["address"] = "127.0.0.1"
                address["port_value"] = self.network.port(here, address["port_value"])
            for item in value.values():
                self._move_addresses(item)

    def close(self) -> None:
        """Ends everything and removes the files."""
        for container in reversed(self.running.values()):
            container.kill()
        shutil.rmtree(self.root, ignore_errors=True)


def _envoy_binary() -> str:
    from services.supervisor.edge import envoy_binary

    return str(envoy_binary())


def _wait_http(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                if response.status == 200:
                    return
        except OSError:
            pass
        assert time.monotonic() < deadline, f"{url} did not answer"
        time.sleep(0.1)


def _ask(port: int) -> None:
    """One streamed chat through Envoy, and one refusal."""
    body = {
        "model": _MODEL,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
        "stream": True,
    }
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    with httpx.Client(timeout=60, trust_env=False) as client:
        answer = client.post(url, json=body, headers=_KEY)
        assert answer.status_code == 200, answer.text
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        assert json.loads(lines[0])["object"] == "chat.completion.chunk"
        refused = client.post(url, json=body, headers={"authorization": "Bearer mr-wrong"})
        assert refused.status_code == 401


@pytest.fixture
def root() -> Iterator[Path]:
    # Not pytest's own folder: the containers' user must be able to pass through.
    folder = Path(tempfile.mkdtemp(prefix="millrace-deployment-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def composed(root: Path) -> Iterator[tuple[Deployment, dict[str, Any]]]:
    compose = load()
    deployment = Deployment(root, list(compose["services"]))
    yield deployment, compose["services"]
    deployment.close()


def _dockerfile(services: dict[str, Any], name: str) -> str:
    build = services[name].get("build") or services["configure"]["build"]
    return str(build["dockerfile"])


def _start_composed(deployment: Deployment, services: dict[str, Any], name: str) -> Container:
    service, dockerfile = services[name], _dockerfile(services, name)
    parsed = parse(REPOSITORY / dockerfile)
    argv = [*service.get("entrypoint", parsed.command("ENTRYPOINT"))]
    argv += service.get("command", parsed.command("CMD"))
    assert service["read_only"] is True
    writable = [entry.partition(":")[0] for entry in service["tmpfs"]]
    writable += [volume.split(":")[1] for volume in service.get("volumes", ()) if not volume.endswith(":ro")]
    return deployment.start(name, dockerfile, argv, environment(service), writable)


def test_the_compose_file_runs(composed: tuple[Deployment, dict[str, Any]]) -> None:
    deployment, services = composed
    for name in ("secrets", "edge", "state"):
        deployment.mount(f"/var/lib/millrace/{name}", name)
    port = deployment.network.port("redis", 6379)
    data = deployment.mount("/data", "redis")
    words = [*services["redis"]["command"], "--port", str(port), "--bind", "127.0.0.1"]
    deployment.launch(
        "redis", [str(shutil.which(words[0])), *words[1:]], {}, data, as_user=deployment.as_user
    )

    configure = _start_composed(deployment, services, "configure")
    assert configure.wait() == 0, configure.log.read_text()
    secret = deployment.mounts["/var/lib/millrace/secrets"] / "context_secret"
    first = secret.read_text()
    assert len(first.strip()) == 64
    assert secret.stat().st_mode & 0o077 == 0
    assert _start_composed(deployment, services, "configure").wait() == 0
    assert secret.read_text() == first, "a second run keeps the secret"

    for name in ("tokenizer", "engine"):
        _start_composed(deployment, services, name)
    for name in ("tokenizer", "engine"):
        deployment.running[name].wait_for_line(f"ready {name}")
        deployment.check_health(name, _dockerfile(services, name))
    _start_composed(deployment, services, "gateway").wait_for_line("ready gateway")
    deployment.check_health("gateway", _dockerfile(services, "gateway"))

    edge = deployment.start_envoy(
        services["envoy"]["command"], deployment.mounts["/var/lib/millrace/edge"] / "envoy.yaml"
    )
    _wait_http(f"http://127.0.0.1:{deployment.network.port('envoy', 9902)}/ready")
    health = services["envoy"]["healthcheck"]["test"]
    words = [deployment.network.translate(_slash_to_colon(word), "envoy") for word in health[1:]]
    checked = subprocess.run([_colon_to_slash(word) for word in words], capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    _ask(edge)
    for name in ("gateway", "tokenizer", "engine"):
        address = f"http://127.0.0.1:{deployment.network.port(name, 9464)}/metrics"
        with urllib.request.urlopen(address, timeout=10) as response:
            assert b"millrace_" in response.read(), name
    for name in ("gateway", "engine", "tokenizer"):
        assert deployment.running[name].terminate() == 0, name


def _slash_to_colon(word: str) -> str:
    return re.sub(r"/dev/tcp/([\d.]+)/(\d+)", r"/dev/tcp/ \1:\2", word)


def _colon_to_slash(word: str) -> str:
    return re.sub(r"/dev/tcp/ ([\d.]+):(\d+)", r"/dev/tcp/\1/\2", word)


def test_the_manifests_run(root: Path) -> None:
    manifests = kustomize.build(REPOSITORY / "k8s/overlays/local")
    hosts = [manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == "Service"]
    deployment = Deployment(root, hosts)
    try:
        _run_manifests(deployment, manifests)
    finally:
        deployment.close()


def _run_manifests(deployment: Deployment, manifests: list[kustomize.Manifest]) -> None:
    secrets = kustomize.find(manifests, "Secret", "millrace-secrets")
    assert secrets is not None
    folder = deployment.mount("/run/secrets/millrace", "secrets")
    (folder / "context_secret").write_text(secrets["stringData"]["context_secret"])
    deployment.mount("/var/lib/millrace/state", "state")
    deployment.mount("/etc/envoy/edge", "edge")
    redis = _container(manifests, "redis")
    words = [*redis["command"], *redis["args"], "--port", str(deployment.network.port("redis", 6379))]
    data = deployment.mount("/data", "redis")
    deployment.launch(
        "redis", [str(shutil.which(words[0])), *words[1:]], {}, data, as_user=deployment.as_user
    )
    for name in ("tokenizer", "engine", "gateway"):
        container = _container(manifests, name)
        dockerfile = f"services/{name}/Dockerfile"
        argv = [*parse(REPOSITORY / dockerfile).command("ENTRYPOINT"), *container["args"]]
        variables = _variables(manifests, container, secrets["stringData"])
        started = deployment.start(name, dockerfile, argv, variables, _writable(container))
        started.wait_for_line(f"ready {name}")
    configure = _container(manifests, "envoy", kind="initContainers")
    argv = [*configure["command"], *configure["args"]]
    variables = _variables(manifests, configure, secrets["stringData"])
    rendered = deployment.start(
        "configure", "services/gateway/Dockerfile", argv, variables, _writable(configure)
    )
    assert rendered.wait() == 0, rendered.log.read_text()
    envoy = _container(manifests, "envoy")
    command = [*envoy["command"], *envoy["args"]]
    edge = deployment.start_envoy(command, deployment.mounts["/etc/envoy/edge"] / "envoy.yaml")
    assert command[command.index("--drain-time-s") + 1] == "10"
    probe = envoy["readinessProbe"]["httpGet"]
    (port,) = [port["containerPort"] for port in envoy["ports"] if port["name"] == probe["port"]]
    _wait_http(f"http://127.0.0.1:{deployment.network.port('envoy', port)}{probe['path']}")
    _ask(edge)
    _drain(deployment, envoy)


def _drain(deployment: Deployment, envoy: dict[str, Any]) -> None:
    """The preStop script returns once nothing is in flight, and Envoy then takes no new connections."""
    command = envoy["lifecycle"]["preStop"]["exec"]["command"]
    assert command == ["/bin/bash", "/opt/scripts/drain.sh"]
    admin = deployment.network.port("envoy", 9901)
    script = REPOSITORY / "k8s/base/drain.sh"
    drained = subprocess.run(
        ["/bin/bash", str(script), str(admin), "30"],
        env={"PATH": "/usr/bin:/bin", "SETTLE_S": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert drained.returncode == 0, drained.stderr
    url = f"http://127.0.0.1:{deployment.network.port('envoy', 8080)}/health"
    deadline = time.monotonic() + 30
    while _answers(url):
        assert time.monotonic() < deadline, "Envoy still takes connections"
        time.sleep(0.1)


def _answers(url: str) -> bool:
    try:
        httpx.get(url, timeout=5, trust_env=False)
    except httpx.TransportError:
        return False
    return True


def _container(manifests: list[kustomize.Manifest], name: str, kind: str = "containers") -> dict[str, Any]:
    manifest = kustomize.find(manifests, "Deployment", name) or kustomize.find(manifests, "StatefulSet", name)
    assert manifest is not None
    (container,) = manifest["spec"]["template"]["spec"][kind]
    return dict(container)


def _writable(container: dict[str, Any]) -> list[str]:
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    return [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]


def _variables(
    manifests: list[kustomize.Manifest], container: dict[str, Any], secrets: Mapping[str, str]
) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        config_map = kustomize.find(manifests, "ConfigMap", source["configMapRef"]["name"])
        assert config_map is not None
        found |= config_map["data"]
    for entry in container.get("env", ()):
        if "valueFrom" in entry:
            found[entry["name"]] = secrets[entry["valueFrom"]["secretKeyRef"]["key"]]
        else:
            found[entry["name"]] = entry["value"]
    return found


@pytest.mark.skipif(not can_confine(), reason="needs the right to mount")
def test_nothing_but_declared_paths_can_be_written_to(root: Path) -> None:
    deployment = Deployment(root, [])
    try:
        state = deployment.mount("/var/lib/millrace/state", "state")
        deployment.mount("/var/lib/millrace/secrets", "secrets")
        image = deployment.image("services/tokenizer/Dockerfile")
        # Writable by its owner, so that only the file system can refuse.
        for folder in (image.root / "app", image.root / "etc/millrace"):
            give_to_user(folder, as_user=True)
        tries = ["/tmp", "/var/lib/millrace/state", "/var/lib/millrace/secrets", "/app", "/etc/millrace"]
        script = "import pathlib, sys\n" + "\n".join(
            [
                "for folder in sys.argv[1:]:",
                "    try:",
                "        (pathlib.Path(folder) / 'written').write_text('')",
                "    except OSError as error:",
                "        print(folder, error.errno)",
            ]
        )
        argv = ["python", "-c", script, *tries, "/var/tmp", "/usr"]
        container = deployment.start(
            "probe", "services/tokenizer/Dockerfile", argv, {}, ["/tmp", "/var/lib/millrace/state"]
        )
        assert container.wait() == 0, container.log.read_text()
        refused = [line.split() for line in container.log.read_text().splitlines()]
        expected = [deployment.mounts["/var/lib/millrace/secrets"], image.root / "app"]
        expected += [image.root / "etc/millrace", Path("/var/tmp"), Path("/usr")]
        assert refused == [[str(path), str(errno.EROFS)] for path in expected]
        assert (state / "written").exists()
        assert (root / "scratch/probe/written").exists()
        assert not Path("/tmp/written").exists()
    finally:
        deployment.close()


def test_the_span_store_writes_where_it_is_told(root: Path) -> None:
    """No image of its own starts it, yet its files are in every image of ours."""
    deployment = Deployment(root, ["collector"])
    try:
        state = deployment.mount("/var/lib/millrace/state", "state")
        variables = {
            "MILLRACE_OBSERVABILITY__STORE": "/var/lib/millrace/state/spans.sqlite",
            "MILLRACE_OBSERVABILITY__LISTEN": "0.0.0.0:4317",
            "MILLRACE_OBSERVABILITY__METRICS_LISTEN": "0.0.0.0:9464",
        }
        container = deployment.start(
            "collector",
            "services/tokenizer/Dockerfile",
            ["python", "-m", "observability"],
            variables,
            ["/tmp", "/var/lib/millrace/state"],
        )
        container.wait_for_line("ready observability")
        assert container.terminate() == 0, container.log.read_text()
        assert (state / "spans.sqlite").stat().st_size > 0
    finally:
        deployment.close()
