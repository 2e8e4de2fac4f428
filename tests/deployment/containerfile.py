"""Reads Dockerfiles and .dockerignore, and lays out on disk what an image would hold."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import json
import re
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Stage:
    """One FROM and what follows it."""

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def last(self, instruction: str) -> str:
        """Arguments of the last such instruction, "" when there is none."""
        return next((text for name, text in reversed(self.instructions) if name == instruction), "")

    def every(self, instruction: str) -> list[str]:
        """Arguments of all such instructions."""
        return [text for name, text in self.instructions if name == instruction]


@dataclass
class Dockerfile:
    """Stages in order, with ARG defaults from before the first FROM."""

    path: Path
    arguments: dict[str, str]
    stages: list[Stage]

    @property
    def final(self) -> Stage:
        """The stage that becomes the image."""
        return self.stages[-1]

    @property
    def build(self) -> Stage:
        """The stage that installs and lays out what the image holds."""
        return next(stage for stage in self.stages if stage.name == "build")

    def environment(self) -> dict[str, str]:
        """ENV of the image; a reference to PATH is kept as it is."""
        found: dict[str, str] = {}
        for text in self.final.every("ENV"):
            for word in shlex.split(text):
                name, _, value = word.partition("=")
                found[name] = value
        return found

    def command(self, instruction: str) -> list[str]:
        """ENTRYPOINT or CMD in its exec form."""
        text = self.final.last(instruction)
        return list(json.loads(text)) if text else []

    def health_command(self) -> list[str]:
        """The command of HEALTHCHECK in its exec form."""
        return list(json.loads(self.final.last("HEALTHCHECK").partition("CMD")[2]))

    def requirements(self) -> list[str]:
        """Names of the distributions that the build stage installs."""
        names: list[str] = []
        for stage in self.stages:
            for source, _ in _copies(stage):
                if source.endswith("requirements.txt"):
                    lines = (REPOSITORY / source).read_text().splitlines()
                    names += [line for line in lines if line and not line.startswith("#")]
            if any(text.startswith("TORCH=") for text in stage.every("ARG")):
                names.append("torch")
        return names

    def files(self) -> dict[str, str]:
        """Absolute path in the image to path in the repository, of everything that is copied from there."""
        by_stage: dict[str, dict[str, str]] = {}
        found: dict[str, str] = {}
        for stage in self.stages:
            found = {}
            for text in stage.every("COPY"):
                words = shlex.split(text)
                sources = [word for word in words[:-1] if not word.startswith("--")]
                origin = next((word[7:] for word in words if word.startswith("--from=")), "")
                for source in sources:
                    if not origin:
                        target = words[-1]
                        if len(sources) > 1 or target.endswith("/"):
                            target = f"{target.rstrip('/')}/{Path(source).name}"
                        found[target] = source
                        continue
                    for inner, path in by_stage[origin].items():
                        if inner == source or inner.startswith(source.rstrip("/") + "/"):
                            found[words[-1].rstrip("/") + inner.removeprefix(source.rstrip("/"))] = path
            by_stage[stage.name] = found
        return found


def parse(path: Path) -> Dockerfile:
    """Reads a Dockerfile; comments are dropped and continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for line in filter(None, (line.strip() for line in text.splitlines())):
        instruction, _, rest = line.partition(" ")
        instruction, rest = instruction.upper(), rest.strip()
        if instruction == "FROM":
            words = rest.split()
            base = words[0]
            for name, value in arguments.items():
                base = base.replace(f"${{{name}}}", value)
            stages.append(Stage(base, words[2] if len(words) == 3 else ""))
        elif not stages:
            name, _, value = rest.partition("=")
            arguments[name] = value
        else:
            stages[-1].instructions.append((instruction, rest))
    return Dockerfile(path, arguments, stages)


def _copies(stage: Stage) -> list[tuple[str, str]]:
    found = []
    for text in stage.every("COPY"):
        words = shlex.split(text)
        if not words[0].startswith("--from="):
            found += [(word, words[-1]) for word in words[:-1]]
    return found


class Context:
    """The files that .dockerignore lets through to the builder."""

    def __init__(self) -> None:
        lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
        self._rules = [line.strip() for line in lines if line.strip() and not line.startswith("#")]

    def includes(self, path: str) -> bool:
        """Whether `path` of the repository reaches the builder. The last rule that matches decides."""
        included = True
        for rule in self._rules:
            negated = rule.startswith("!")
            if self._matches(path, rule.removeprefix("!")):
                included = negated
        return included

    def _matches(self, path: str, pattern: str) -> bool:
        parts = path.split("/")
        heads = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        if pattern.startswith("**/"):
            return any(fnmatch.fnmatchcase(part, pattern[3:]) for part in parts)
        return any(
            fnmatch.fnmatchcase(head, pattern) and head.count("/") == pattern.count("/") for head in heads
        )

    def copy(self, source: str, target: Path) -> None:
        """Copies a file or folder as COPY would."""
        origin = REPOSITORY / source
        if origin.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(origin, target)
            return
        for file in origin.rglob("*"):
            relative = file.relative_to(REPOSITORY).as_posix()
            if file.is_file() and self.includes(relative):
                inner = target / file.relative_to(origin)
                inner.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, inner)


def installed(requirements: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """The distributions that `pip install` of these names would bring, from this environment."""
    found: dict[str, importlib.metadata.Distribution] = {}
    todo = [Requirement(text) for text in requirements]
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        distribution = importlib.metadata.distribution(name)
        found[name] = distribution
        for text in distribution.requires or []:
            needed = Requirement(text)
            extras = wanted.extras or {""}
            wants = needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras)
            if wants and canonicalize_name(needed.name) not in found:
                todo.append(needed)
    return found


def lay_out_packages(requirements: list[str], target: Path) -> None:
    """Links exactly these distributions, and what they need, into `target`, as an environment has them."""
    owners: dict[str, set[str]] = {}
    files: dict[str, list[tuple[str, Path]]] = {}
    for name, distribution in installed(requirements).items():
        for file in distribution.files or []:
            top = file.parts[0]
            if top not in {"..", "__pycache__", "/"}:
                owners.setdefault(top, set()).add(name)
                files.setdefault(top, []).append((str(file), Path(str(file.locate()))))
    target.mkdir(parents=True)
    for top, entries in files.items():
        relative, located = entries[0]
        if len(owners[top]) == 1:
            depth = len(Path(relative).parts) - 1
            (target / top).symlink_to(located.parents[depth - 1] if depth else located)
            continue
        for inner, path in entries:
            link = target / inner
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.symlink_to(path)


def size_bytes(requirements: list[str]) -> int:
    """Installed size of the distributions."""
    return sum(
        path.stat().st_size
        for distribution in installed(requirements).values()
        for file in distribution.files or []
        if (path := Path(str(file.locate()))).is_file()
    )
