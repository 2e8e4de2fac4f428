"""Containers of our images that run on this machine, with volumes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.deployment.containerfile import REPOSITORY, parse
from tests.deployment.runtime import (
    Confinement,
    Container,
    Image,
    can_confine,
    can_switch_user,
    give_to_user,
    open_to_all,
)


class Deployment:
    """Containers with shared volumes."""

    def __init__(self, root: Path) -> None:
        self.root = root
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

    def translate(self, text: str, image: Image) -> str:
        """Text of a container's command or environment with paths of this machine."""
        for path, folder in sorted(self.mounts.items(), key=lambda item: -len(item[0])):
            text = text.replace(path, str(folder))
        return image.locate(text)

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
        translated = {key: self.translate(value, image) for key, value in merged.items()}
        translated["PATH"] = image.environment()["PATH"]
        words = [self.translate(word, image) for word in argv]
        program = image.root / "opt/venv/bin" / words[0]
        if program.exists():
            words[0] = str(program)
        confinement = self._confine(name, writable) if self.read_only else None
        logs = self.root / "logs"
        logs.mkdir(exist_ok=True)
        container = Container(
            words,
            translated,
            image.root / "app",
            logs / f"{name}.log",
            as_user=self.as_user,
            confinement=confinement,
        )
        self.running[name] = container
        return container

    def _confine(self, name: str, writable: Sequence[str]) -> Confinement:
        folders = tuple(self.mounts[path] for path in writable if path != "/tmp")
        return Confinement(self.root, self.root / "scratch" / name, "/tmp" in writable, folders)

    def close(self) -> None:
        """Ends everything and removes the files."""
        for container in reversed(self.running.values()):
            container.kill()
        shutil.rmtree(self.root, ignore_errors=True)
