"""Rules that every image keeps, and what would fail only when it is built or started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.sources import MAKEFILES
from tests.deployment import settings
from tests.deployment.containerfile import REPOSITORY, Context, Dockerfile, parse, size_bytes

PATHS = sorted((REPOSITORY / "services").glob("*/Dockerfile*"))
FINISH = REPOSITORY / "services/finish_image.sh"
# Size on disk of python:3.11-slim-bookworm, in bytes.
BASE_BYTES = 125_000_000
# The tokenizer service has numpy, with which the vocabularies of GGUF files are read.
# 12 MB of the gateway's are the client of object storage, 19 what the gate of a rollout needs.
LIMIT_BYTES = {"gateway": 301_000_000, "tokenizer": 350_000_000}


def _id(path: Path) -> str:
    return path.relative_to(REPOSITORY / "services").as_posix()


@pytest.fixture(params=PATHS, ids=_id)
def dockerfile(request: pytest.FixtureRequest) -> Dockerfile:
    return parse(request.param)


def test_there_is_an_image_for_every_deployable() -> None:
    assert {_id(path) for path in PATHS} == {
        "engine/Dockerfile",
        "engine/Dockerfile.gpu",
        "engine/Dockerfile.vllm",
        "gateway/Dockerfile",
        "tokenizer/Dockerfile",
    }


def test_bases_are_pinned_to_a_patch_release(dockerfile: Dockerfile) -> None:
    for stage in dockerfile.stages:
        assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-[a-z]+", stage.base), stage.base


def test_it_is_built_in_stages_and_the_image_holds_no_build_tools(dockerfile: Dockerfile) -> None:
    assert len(dockerfile.stages) >= 2
    final = " ".join(dockerfile.final.every("RUN"))
    assert "pip install" not in final
    assert "pip uninstall --yes pip setuptools" in " ".join(dockerfile.build.every("RUN"))


def test_it_runs_as_a_numbered_user_that_is_not_root(dockerfile: Dockerfile) -> None:
    assert dockerfile.final.last("USER") == "10001:10001"
    user_at = [name for name, _ in dockerfile.final.instructions].index("USER")
    after = {name for name, _ in dockerfile.final.instructions[user_at:]}
    assert not after & {"RUN", "COPY"}, "nothing is made as the user that serves"


def test_commands_are_in_exec_form_and_health_is_checked(dockerfile: Dockerfile) -> None:
    assert dockerfile.command("ENTRYPOINT")[:2] == ["python", "-m"]
    assert dockerfile.command("CMD") == ["--config", "/etc/millrace/millrace.toml"]
    assert dockerfile.health_command()[:3] == ["python", "-m", "runtime.healthcheck"]


def test_extra_arguments_of_pip_reach_the_install_of_torch_alone() -> None:
    """They name PyTorch's own index, which lacks versions of what torch needs."""
    lines = "\n".join(part.read_text() for part in MAKEFILES).splitlines()
    installs = [line for line in lines if "$(PIP_ARGS)" in line and " install " in line]
    # One in the environment's rule, one in the rule that renews the constraints.
    assert len(installs) == 2
    for line in installs:
        assert "--no-deps" in line.split(), line
        assert line.endswith('$(PIP_ARGS) "$(TORCH)"'), line


def test_installs_are_pinned_and_leave_nothing_behind(dockerfile: Dockerfile) -> None:
    for stage in dockerfile.stages:
        assert not stage.every("ADD")
        assert not [
            text for text in stage.every("RUN") if "sudo" in text or re.search(r"curl.*\|\s*sh", text)
        ]
        for run in stage.every("RUN"):
            for install in re.findall(r"pip install [^&]*", run):
                assert "--no-cache-dir" in install, install
                assert "-c constraints.txt" in install, install
                # The index of one package lacks versions of the others.
                assert "--index-url" not in install or "--no-deps" in install, install
            if "apt-get install" in run:
                assert "--no-install-recommends" in run, run
                assert "rm -rf /var/lib/apt/lists/*" in run, run


def test_requirements_are_pinned_by_the_constraints(dockerfile: Dockerfile) -> None:
    pins = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (REPOSITORY / "constraints.txt").read_text().split()
    }
    for name in dockerfile.requirements():
        assert name == "torch" or name.partition("[")[0] in pins, name


def test_every_copied_path_exists_and_reaches_the_builder(dockerfile: Dockerfile) -> None:
    context = Context()
    for target, source in dockerfile.files().items():
        path = REPOSITORY / source
        assert path.exists(), source
        if path.is_file():
            assert context.includes(source), source
        else:
            files = [file.relative_to(REPOSITORY).as_posix() for file in path.rglob("*") if file.is_file()]
            assert any(context.includes(file) for file in files), f"{source} arrives empty at {target}"


def test_nothing_private_reaches_the_builder() -> None:
    context = Context()
    for path in (
        ".env",
        ".git/config",
        ".millrace/traces.sqlite",
        ".venv/pyvenv.cfg",
        "tests/__init__.py",
        "gateway/key.pyc",
    ):
        assert not context.includes(path), path
    for path in (
        "runtime/config.py",
        "engine/config.py",
        "config/millrace.toml",
        "models/millrace-nano/config.json",
    ):
        assert context.includes(path), path


def test_variables_are_known_and_listeners_are_exposed(dockerfile: Dockerfile) -> None:
    environment = dockerfile.environment()
    settings.accept(REPOSITORY / "config/millrace.toml", environment)
    ports = {value.rpartition(":")[2] for name, value in environment.items() if name.endswith("_LISTEN")}
    assert ports == set(dockerfile.final.last("EXPOSE").split())
    assert not [name for name in environment if re.search("SECRET|PASSWORD|API_KEY|_TOKEN$", name)]
    assert dockerfile.health_command()[3].rpartition(":")[2] in ports


def test_building_asks_no_registry_for_a_builder(dockerfile: Dockerfile) -> None:
    assert not re.match(r"#\s*syntax\s*=", dockerfile.path.read_text(), re.IGNORECASE)


def test_what_is_copied_can_be_read_whatever_the_checkout_s_modes(dockerfile: Dockerfile) -> None:
    """Docker keeps modes, and files of an owner whose umask is 077 are closed to the containers' user."""
    assert not [text for text in dockerfile.final.every("COPY") if "--from=" not in text]
    targets = {text.split()[-1] for text in dockerfile.final.every("COPY")} - {"/opt/venv"}
    assert dockerfile.build.instructions[-1] == ("RUN", "sh /app/services/finish_image.sh")
    runs = [text for stage in dockerfile.stages for text in stage.every("RUN")]
    commands = "\n".join((FINISH.read_text(), *runs))
    opened = " ".join(re.findall(r"chmod -R a\+rX ([^&\n]*)", commands)).split()
    assert targets <= set(opened)


def test_health_is_known_within_a_second_of_a_change(dockerfile: Dockerfile) -> None:
    text = dockerfile.final.last("HEALTHCHECK")
    assert "--interval=1s" in text
    command = dockerfile.health_command()
    hold_s = float(command[command.index("--hold") + 1])
    (timeout_s,) = re.findall(r"--timeout=(\d+)s", text)
    assert float(timeout_s) > hold_s


def test_kernels_are_compiled_from_their_sources_alone() -> None:
    """So that the builder takes the compiled ones again when other files change."""
    dockerfile = parse(REPOSITORY / "services/engine/Dockerfile")
    (kernels,) = [stage for stage in dockerfile.stages if stage.name == "kernels"]
    assert kernels.every("COPY") == ["--from=sources /app /app"]
    (sources,) = [stage for stage in dockerfile.stages if stage.name == "sources"]
    assert "-delete" in sources.every("RUN")[0]


@pytest.mark.parametrize("name", ["gateway", "tokenizer"])
def test_services_without_tensors_stay_small(name: str) -> None:
    dockerfile = parse(REPOSITORY / "services" / name / "Dockerfile")
    context = Context()
    copied = sum(
        file.stat().st_size
        for source in dockerfile.files().values()
        for file in (REPOSITORY / source).rglob("*")
        if file.is_file() and context.includes(file.relative_to(REPOSITORY).as_posix())
    )
    total = BASE_BYTES + size_bytes(dockerfile.requirements()) + copied
    assert total < LIMIT_BYTES[name], f"{total / 1e6:.0f} MB"


def test_the_cpu_image_takes_torch_without_cuda_and_the_gpu_image_with_it() -> None:
    cpu = parse(REPOSITORY / "services/engine/Dockerfile")
    gpu = parse(REPOSITORY / "services/engine/Dockerfile.gpu")
    assert "TORCH_INDEX=https://download.pytorch.org/whl/cpu" in cpu.build.every("ARG")
    assert '--index-url "${TORCH_INDEX}"' in cpu.build.every("RUN")[0]
    assert not [text for text in gpu.build.every("ARG") if "TORCH_INDEX" in text]
    version = "TORCH=torch==2.13.0"
    assert version in cpu.build.every("ARG")
    assert version in gpu.build.every("ARG")
    assert gpu.environment()["MILLRACE_ENGINE__DEVICE"] == "cuda"
