"""A level that ours is forced to holds the peers, and what it does not hold is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers import llama_cpp, openvino, transformers, vllm_cpu
from benchmarks.peers.levels import HELD, explanation, held_variables
from kernels.native.build import LEVELS
from kernels.native.config import LEVEL_VARIABLE


@pytest.fixture(autouse=True)
def no_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)


def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """The variables with which peers would be started, where everything is installed."""
    for module in (openvino, transformers):
        monkeypatch.setattr(module, "environment", lambda folder, *_: folder)
    monkeypatch.setattr(vllm_cpu, "install", lambda folder: folder)
    converted = tmp_path / "small-openvino"
    converted.mkdir(exist_ok=True)
    (converted / "openvino_model.xml").touch()
    return {
        module.__name__.rpartition(".")[2]: dict(module.prepare(tmp_path, tmp_path / "small")(1).variables)
        for module in (openvino, transformers, vllm_cpu)
    }


def test_peers_are_held_where_a_level_is_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(
        "ONEDNN_MAX_CPU_ISA" in variables for variables in prepared(tmp_path, monkeypatch).values()
    )
    monkeypatch.setenv(LEVEL_VARIABLE, "avx2")
    for variables in prepared(tmp_path, monkeypatch).values():
        assert variables["ONEDNN_MAX_CPU_ISA"] == "AVX2"
        assert variables["ATEN_CPU_CAPABILITY"] == "avx2"


@pytest.mark.parametrize("level", ["", *HELD])
def test_llama_cpp_is_built_for_the_level(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(llama_cpp.subprocess, "run", lambda command, check: commands.append(command))
    if level:
        monkeypatch.setenv(LEVEL_VARIABLE, level)
    server = llama_cpp._build(tmp_path, tmp_path)
    configure = commands[0]
    assert f"-DGGML_NATIVE={'OFF' if level else 'ON'}" in configure
    assert ("-DGGML_AVX512=ON" in configure) == level.startswith("avx512")
    assert server.parents[1].name == (f"build-{level}" if level else "build"), (
        "builds of two levels lie in one folder"
    )


def test_what_is_not_held_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = ["openvino-int8", "llama.cpp-q8_0"]
    assert explanation(peers) == ""
    monkeypatch.setenv(LEVEL_VARIABLE, "avx2")
    assert "nothing holds openvino's" in explanation(peers)
    assert "nothing holds" not in explanation(["llama.cpp-q8_0"])
    monkeypatch.setenv(LEVEL_VARIABLE, "amx")
    assert held_variables() == {}
    assert "nothing holds the peers" in explanation(peers)


def test_levels_are_those_that_there_are() -> None:
    assert not LEVELS or set(HELD) <= set(LEVELS) or "neon" in LEVELS
