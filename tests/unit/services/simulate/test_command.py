"""`millrace simulate` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from services.cli.app import app

CONFIG = """
[model]
path = "none"
[gateway]
default_tier = "standard"
[tiers.standard]
ttft_target_ms = 1000
admission = "best_effort"
[tiers.gold]
priority = 5
[engine.scheduler]
max_num_seqs = 8
"""


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No stack of this machine has a say."""
    monkeypatch.setenv("MILLRACE_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "millrace.toml").write_text(CONFIG, encoding="utf-8")
    lines = [
        f'{{"timestamp": {100 * number}, "input_length": 200, "output_length": 20}}' for number in range(40)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines), encoding="utf-8")


def _simulate(folder: Path, *arguments: str) -> Result:
    config = str(folder / "millrace.toml")
    return CliRunner().invoke(app, ["simulate", "--config", config, "--seeds", "2", *arguments])


def test_a_trace_on_so_many_engines(tmp_path: Path) -> None:
    found = _simulate(
        tmp_path,
        *("--trace", str(tmp_path / "trace.jsonl"), "--engines", "2", "--json", str(tmp_path / "out.json")),
    )
    assert found.exit_code == 0, found.output
    assert "TTFT p99 ms" in found.output
    told = json.loads((tmp_path / "out.json").read_bytes())
    assert told["engines"] == 2
    assert told["is_kept"] is True
    assert [run["total"]["num_requests"] for run in told["runs"]] == [40, 40]
    assert told["intervals"]["total"]["goodput"] == {"mean": 1.0, "low": 1.0, "high": 1.0}


def test_the_least_number_of_engines(tmp_path: Path) -> None:
    drawn = ("--rate", "60", "--duration", "5", "--input-tokens", "100", "--output-tokens", "40")
    asked = (*drawn, "--slo", "ttft=100,tpot=50", "--json", str(tmp_path / "out.json"))
    found = _simulate(tmp_path, *asked)
    assert found.exit_code == 0, found.output
    told = json.loads((tmp_path / "out.json").read_bytes())
    assert told["is_searched"] is True
    count = told["engines"]
    assert f"{count} {'engine is' if count == 1 else 'engines are'} enough" in found.output
    fewer = _simulate(tmp_path, *asked, "--engines", str(told["engines"] - 1))
    assert fewer.exit_code == 1
    few = _simulate(tmp_path, *asked, "--most-engines", str(told["engines"] - 1))
    assert few.exit_code == 1
    assert "are too few" in few.output


def test_scaling_and_a_lost_zone(tmp_path: Path) -> None:
    asked = ("--rate", "4", "--duration", "60", "--load-seconds", "5")
    scaled = _simulate(tmp_path, *asked, "--autoscale", "--most-engines", "4", "--goodput", "0.1")
    assert scaled.exit_code == 0, scaled.output
    assert "engine-hours" in scaled.output
    lost = _simulate(tmp_path, *asked, "--engines", "4", "--zones", "2", "--lose-zone", "30:5")
    assert lost.exit_code == 0, lost.output


REFUSED = {
    ("--trace", "missing.jsonl"): "missing.jsonl",
    ("--rate", "0"): "--rate 0.0: expected",
    ("--duration", "inf"): "--duration inf: expected",
    ("--tier", "silver=1"): "--tier silver: there is no [tiers.silver]; known: gold, standard",
    ("--tier", "gold"): "--tier 'gold': expected",
    ("--slo", "ttft=0"): "--slo 'ttft=0': expected",
    ("--slo", "silver:ttft=5"): "--slo silver: there is no [tiers.silver]",
    ("--slo", "itl=5"): "--slo 'itl=5': expected",
    ("--burst", "1:2"): "--burst '1:2': expected AT:SECONDS:FACTOR",
    ("--burst", "1:2:0.5"): "a factor of 1 or more",
    ("--lose-zone", "x"): "--lose-zone 'x': expected AT",
    ("--goodput", "1.5"): "--goodput 1.5: expected a part",
    ("--input-tokens", "many"): "length 'many'",
    ("--zones", "3", "--engines", "2"): "--zones 3: there are 2 engines",
    ("--autoscale", "--engines", "2"): "--engines: with --autoscale",
    ("--steps", "missing.json"): "missing.json",
    ("--calibrate",): "--calibrate: give --steps FILE, which --measure wrote",
    ("--json", "missing/out.json"): "missing/out.json",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_cannot_be_meant_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = _simulate(tmp_path, *arguments)
    assert refused.exit_code == 2, refused.output
    assert REFUSED[arguments] in " ".join(refused.output.split())


def test_a_line_of_a_trace_is_refused_by_its_number(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(trace.read_text(encoding="utf-8") + '\n{"timestamp": 5}', encoding="utf-8")
    refused = _simulate(tmp_path, "--trace", str(trace))
    assert refused.exit_code == 2
    assert "trace.jsonl, line 41: no field input_length" in "".join(refused.output.splitlines())
