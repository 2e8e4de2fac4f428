"""What engines measured, kept by machine, model and quantization."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli import doctor
from services.supervisor import speeds

NANO = {"engine": "nano"}


def said(alone: float, quantize: str = "off", kernels: str = "avx2") -> dict[str, dict[str, str]]:
    """What an engine tells when it is ready."""
    told = {"kernels": kernels, "quantize": quantize, "streams": "8", "together": "500", "prompt": "1000"}
    return {"engine": {**told, "alone": str(alone)}, "gateway": {}}


def test_the_latest_of_each_quantization_is_kept(tmp_path: Path) -> None:
    for alone, quantize in ((100, "off"), (120, "off"), (180, "w8a8")):
        speeds.keep(tmp_path, speeds.of_engines(NANO, said(alone, quantize)))
    kept = {each.quantize: each.alone for each in speeds.read(tmp_path)}
    assert kept == {"off": 120, "w8a8": 180}


def test_each_engine_has_its_own_model_and_what_only_reads_is_told_as_that() -> None:
    models = {"engine-0": "nano", "engine-1": "embedder"}
    told = {"engine-0": said(100)["engine"], "engine-1": said(0)["engine"], "gateway-0": {}}
    nano, embedder = speeds.of_engines(models, told)
    assert (nano.model, embedder.model) == ("nano", "embedder")
    assert str(nano) == "100 tokens/s alone, 500 for 8 at once, 1000 of prompts"
    assert str(embedder) == "1000 tokens/s of what it reads"
    assert speeds.advice([embedder], []) == ""
    assert "--quantize w8a8 may be" in speeds.advice([embedder, nano], [])


def test_what_is_not_whole_counts_as_nothing(tmp_path: Path) -> None:
    (tmp_path / speeds.FILE_NAME).write_text("[{")
    assert speeds.read(tmp_path) == []
    speeds.keep(tmp_path, speeds.of_engines(NANO, said(100)))
    assert len(speeds.read(tmp_path)) == 1


def test_advice_names_what_was_faster_here(tmp_path: Path) -> None:
    plain, rounded = (speeds.of_engines(NANO, said(*each)) for each in ((100, "off"), (180, "w8a8")))
    assert "--quantize w8a8 may be" in speeds.advice(plain, [])
    assert "--quantize w8a8 reached 180 tokens/s alone" in speeds.advice(plain, [*plain, *rounded])
    # Not of another model, nor of what runs already, nor where it was measured and is slower.
    assert "reached" not in speeds.advice(
        speeds.of_engines({"engine": "other"}, said(100)), [*plain, *rounded]
    )
    assert speeds.advice(rounded, [*plain, *rounded]) == ""
    assert speeds.advice(plain, [*plain, *speeds.of_engines(NANO, said(90, "w8a8"))]) == ""
    # GPUs have formats of their own.
    assert speeds.advice(speeds.of_engines(NANO, said(100, "off", "triton")), []) == ""


def test_doctor_names_what_hinders(tmp_path: Path) -> None:
    pages = tmp_path / "kernel/mm/transparent_hugepage/enabled"
    governor = tmp_path / "devices/system/cpu/cpu0/cpufreq/scaling_governor"
    for path, text in ((pages, "always madvise [never]\n"), (governor, "powersave\n")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    found = {each.subject: each for each in doctor._hindrances(tmp_path)}
    assert {name: each.state for name, each in found.items()} == {"huge pages": "note", "governor": "note"}
    pages.write_text("[always] madvise never\n")
    governor.write_text("performance\n")
    assert {each.state for each in doctor._hindrances(tmp_path)} == {"good"}
    assert list(doctor._hindrances(tmp_path / "nothing")) == []


def test_doctor_shows_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_STATE_DIR", str(tmp_path))
    speeds.keep(tmp_path, speeds.of_engines(NANO, said(100, "w8a8")))
    (found,) = doctor._speeds()
    assert "nano in w8a8: 100 tokens/s alone" in found.text
