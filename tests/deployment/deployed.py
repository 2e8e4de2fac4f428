"""Containers that run on this machine as a deployment starts them, and what is asked of them."""

from __future__ import annotations

import json
import shutil
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

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

KEY = {"authorization": "Bearer mr-dev-local"}
MODEL = "millrace-nano"


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

    def start_envoy(self, argv: list[str], config: Path) -> int:
        """Starts Envoy with a rendered configuration; gives the port that stands for 8080."""
        document = yaml.safe_load(config.read_text())
        self._move_addresses(document)
        moved = self.root / "envoy-moved.yaml"
        moved.write_text(yaml.safe_dump(document))
        index = argv.index("--config-path") + 1
        assert argv[index] == "/etc/envoy/edge/envoy.yaml"
        places = {"/opt/scripts/envoy.sh": str(REPOSITORY / "k8s/base/envoy.sh"), "envoy": _envoy_binary()}
        words = [*(places.get(word, word) for word in argv[:index]), str(moved), *argv[index + 1 :]]
        variables = {"PATH": "/usr/bin:/bin", "SETTLE_S": "0", "DRAIN_LIMIT_S": "30"}
        variables["ADMIN_PORT"] = str(self.network.port("envoy", 9901))
        self.launch("envoy", [*words, "--concurrency", "1"], variables, self.root)
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


def wait_http(url: str) -> None:
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                if response.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.1)


def ask(port: int, model: str = MODEL) -> None:
    """One streamed chat through Envoy, and one refusal."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
        "stream": True,
    }
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    with httpx.Client(timeout=60, trust_env=False) as client:
        answer = client.post(url, json=body, headers=KEY)
        assert answer.status_code == 200, answer.text
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        first = json.loads(lines[0])
        assert (first["object"], first["model"]) == ("chat.completion.chunk", model)
        refused = client.post(url, json=body, headers={"authorization": "Bearer mr-wrong"})
        assert refused.status_code == 401
