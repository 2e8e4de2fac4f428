"""The command around its child: progress, failures, the result that appears whole, and its card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.vllm_core import install
from runtime.errors import ConfigError
from services.cli.app import app
from services.gate.cases import GateVerdict
from services.gate.client import ServerIdentity
from services.gate.run import Comparison, Side
from services.gate.suite import Suite, TaskLayer
from services.gate.verdict import LayerResult
from services.quantize import card, environment
from services.quantize.calibration import CalibrationSet, CalibrationText
from services.quantize.judge import default_suite
from services.quantize.run import LayerProgress, Quantized, QuantizeJob, compress
from tests.unit.engine.checkpoints import make_checkpoint

# A child that finishes two layers, each only if its file is not there yet, and then a result.
GOOD = """
mkdir -p $OUT; touch $LAYERS/layer-00000.safetensors
say '{"event": "loaded", "layers": 2}'
say '{"event": "texts", "texts": 1, "tokens": 40}'
say '{"event": "layer", "done": 1, "total": 2, "kept": true, "seconds_left": null}'
say '{"event": "layer", "done": 2, "total": 2, "kept": false, "seconds_left": 0.5}'
say '{"event": "saving"}'
echo weights > $OUT/model.safetensors; echo x > $OUT/recipe.yaml
say '{"event": "done", "peak_bytes": 73400320, "seconds": 9.5, "versions": {"llmcompressor": "1.2"}}'
"""


def scripted(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Puts a shell script in the place of llm-compressor's interpreter."""
    python = folder / "child"
    field = 'sed -n \'s/.*"{}": "\\([^"]*\\)".*/\\1/p\' $3'
    python.write_text(
        "#!/bin/sh\n"
        f"OUT=$({field.format('out')}); LAYERS=$({field.format('layers')})\n"
        'FD=$4; say() { echo "$1" >> /dev/fd/$FD; }\n' + script
    )
    python.chmod(0o755)
    monkeypatch.setattr(environment, "ensure_quantizer", lambda tell: python)


def job(folder: Path, **changes: Any) -> QuantizeJob:
    make_checkpoint(folder / "model", "llama")
    (folder / "model" / "tokenizer.json").write_text("{}")
    texts = CalibrationSet(
        name="texts.jsonl",
        texts=(CalibrationText(line=1, text="Hello there."),),
        held_out=(CalibrationText(line=8, text="Unseen."),),
    )
    values: dict[str, Any] = {
        "model": "org/model",
        "checkpoint": folder / "model",
        "scheme": "int4",
        "method": "gptq",
        "group_size": 64,
        "out": folder / "smaller",
        "calibration": texts,
    }
    return QuantizeJob(**values | changes)


def run(wanted: QuantizeJob) -> tuple[Quantized, list[LayerProgress], list[str]]:
    layers: list[LayerProgress] = []
    told: list[str] = []

    def write_card(found: Quantized, folder: Path) -> None:
        (folder / "README.md").write_text(card.card(found, card.NO_GATE))

    return compress(wanted, write_card, told.append, layers.append), layers, told


def test_a_result_appears_whole_with_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(tmp_path, monkeypatch, GOOD)
    found, layers, told = run(job(tmp_path))
    assert [(each.done, each.total, each.kept) for each in layers] == [(1, 2, True), (2, 2, False)]
    assert "writing the result" in told
    out = tmp_path / "smaller"
    names = ["README.md", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(each.name for each in out.iterdir()) == names
    # Nothing is left beside it.
    assert sorted(each.name for each in tmp_path.iterdir()) == ["child", "model", "smaller"]
    text = (out / "README.md").read_text()
    assert found.job.calibration is not None
    for part in (
        *("# model, int4 by gptq", "groups of 64", "Nothing was measured", "1 texts, 40 tokens"),
        *(
            found.model_digest,
            found.job.calibration.digest,
            "1 texts, for the gate alone",
            "70 MiB at the peak",
        ),
        *("2 layers, 1 of them by a run before", "llmcompressor 1.2", "--scheme int4 --method gptq"),
    ):
        assert part in text, part


def test_a_failure_keeps_the_layers_and_the_same_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = (
        'touch $LAYERS/layer-00000.safetensors; say \'{"event": "error", "message": "no mappings"}\'; exit 1'
    )
    scripted(tmp_path, monkeypatch, failing)
    wanted = job(tmp_path)
    with pytest.raises(ConfigError, match=r"llm-compressor ended: no mappings; .*log\.txt has the rest"):
        run(wanted)
    assert not wanted.out.exists()
    (folder,) = tmp_path.glob(".smaller.*")
    assert (folder / "layers" / "layer-00000.safetensors").exists()
    scripted(tmp_path, monkeypatch, "test -f $LAYERS/layer-00000.safetensors || exit 9\n" + GOOD)
    run(wanted)
    assert wanted.out.is_dir()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("kill -9 $$", "was killed, probably because memory ran out: give fewer --samples"),
        ("echo 'ImportError: nothing' >&2; exit 3", "ended with 3: ImportError: nothing"),
        ("exit 0", "ended with 0: it said nothing"),
    ],
)
def test_how_a_child_died_is_told(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(tmp_path, monkeypatch, script)
    with pytest.raises(ConfigError, match=message):
        run(job(tmp_path))


def test_what_others_made_in_the_environments_place_is_named(tmp_path: Path) -> None:
    assert environment.quantizer_python(tmp_path / "none") is None
    with pytest.raises(ConfigError, match="MILLRACE_QUANTIZE_HOME"):
        environment.quantizer_python(tmp_path)


def test_without_an_index_the_command_and_another_way_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(folder: Path, fill: Any) -> bool:
        raise ConfigError("pip ended with 1 at install torch==2")

    monkeypatch.setenv("MILLRACE_QUANTIZE_HOME", str(tmp_path / "none"))
    monkeypatch.setattr(environment, "make_environment", away)
    with pytest.raises(
        ConfigError, match=r"ended with 1 at install torch==2.*PIP_INDEX_URL.*pip install llm"
    ):
        environment.ensure_quantizer(lambda text: None)


def test_torch_for_cpus_is_installed_before_all_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def pip(python: Path, *arguments: str) -> None:
        asked.append(arguments)

    monkeypatch.setattr(install, "pip", pip)
    monkeypatch.setattr(environment, "pip", pip)
    monkeypatch.setattr(environment.shutil, "which", lambda program: None)
    monkeypatch.setattr(install.venv, "create", lambda folder, **_: (folder / "bin").mkdir(parents=True))
    monkeypatch.setenv("MILLRACE_QUANTIZE_HOME", str(tmp_path / "made"))
    told: list[str] = []
    assert environment.ensure_quantizer(told.append) == tmp_path / "made" / "bin" / "python"
    torch = f"torch=={install.TORCH}+cpu"
    assert asked == [("install", "--no-deps", torch), ("install", torch, *environment.PACKAGES)]
    assert "installing llm-compressor" in told[0]


# --- the command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--scheme", "int4", "--method", "smoothquant"), "--method smoothquant with --scheme int4"),
        (("--scheme", "int4", "--method", "gptq"), "--method gptq looks at what the model does"),
        (("--scheme", "int4", "--method", "awq", "--calibration", "none.jsonl"), "none.jsonl: No such file"),
        (("--scheme", "int8", "--group-size", "64"), "--group-size is of --scheme int4"),
    ],
)
def test_the_command_refuses_with_status_2(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "llama", hidden_size=64, intermediate_size=128)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    arguments = ["quantize", str(tmp_path / "model"), *options, "--out", str(tmp_path / "out")]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 2
    assert message in found.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_a_suite_that_could_not_judge_is_refused_before_hours_of_work(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "llama", hidden_size=64, intermediate_size=128)
    (tmp_path / "suite.toml").write_text("[task]\nfile = 'tasks.jsonl'\n")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "hi", "check": "exact"}\n')
    options = ("--scheme", "int8", "--gate", str(tmp_path / "suite.toml"), "--out", str(tmp_path / "out"))
    found = CliRunner().invoke(app, ["quantize", str(tmp_path / "model"), *options])
    assert found.exit_code == 2
    assert "tasks.jsonl:1: the case has no answer" in " ".join(found.output.split())
    assert not (tmp_path / "out").exists()


# --- the card ---------------------------------------------------------------------------------------------


IDENTITY = ServerIdentity(
    model="m",
    window=4096,
    token_ids=(),
    token_texts=(),
    chars_per_token=4.0,
    digest="",
    has_logprobs=True,
    seeds_hold=True,
    has_echo=True,
)


def compared(verdict: GateVerdict) -> Comparison:
    side = Side(url="http://here", identity=IDENTITY)
    layer = LayerResult(
        layer="task",
        verdict=verdict,
        decides=True,
        delta=0.05,
        difference=0.2,
        lower=0.1,
        upper=0.3,
        bootstrap_lower=0.1,
        bootstrap_upper=0.3,
        mcnemar_p=0.01,
        p_value=0.001,
        baseline=0.9,
        candidate=0.7,
        num_cases=40,
        num_questions=40,
        note="few",
    )
    return Comparison(
        suite=Suite(name="s", task=TaskLayer()),
        suite_digest="d1g",
        baseline=side,
        candidate=side,
        verdict=verdict,
        layers=(layer,),
    )


def test_a_card_has_the_verdict_and_its_figures() -> None:
    text = card.judged(compared(GateVerdict.WORSE))
    assert text.startswith("**worse**")
    assert "suite `s`, digest `d1g`" in text
    assert "| task | worse by 0.2 | 0.900 | 0.700 | +0.2000 | +0.100 … +0.300 | 40 |" in text
    assert text.endswith("task: few.")


def test_the_default_suite_measures_perplexity_on_what_calibrated_nothing(tmp_path: Path) -> None:
    said = ({"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."})
    held = (CalibrationText(line=8, text="Unseen."), CalibrationText(line=16, messages=said))
    suite = default_suite(held, tmp_path)
    assert suite.intrinsic is not None
    lines = (tmp_path / suite.intrinsic.file).read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["Unseen.", "Who?\n\nMe."]
    assert not suite.decides("tokens")
    without = default_suite((), tmp_path)
    assert without.intrinsic is not None
    assert without.intrinsic.file == ""
