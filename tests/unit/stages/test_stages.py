"""Stages of `.ci/run`: what is red, what is unsteady, what is left out, and what the closing table says."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tests.stages import closing, commands, run, table
from tests.stages.run import Outcome, Result, run_stage
from tests.stages.table import ROOT, Stage, read_table

# Names of the cases are what a shell and make read in their own ways.
TESTS = """
import pathlib
import pytest

@pytest.mark.parametrize("case", ["a b", "$HOME 'quoted'", "[x]"])
def test_{name}(case):
    flag = pathlib.Path(__file__).with_name(f"{{hash(case)}}")
    was_there = flag.exists()
    flag.touch()
    assert {condition}
"""


@pytest.fixture(autouse=True)
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of digests for this test alone, and hashes of texts that every process has in common."""
    folder = ROOT / "build" / f"stages-{os.getpid()}-{tmp_path.name}"
    monkeypatch.setattr(table, "GREEN", folder / "green")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    yield table.GREEN
    shutil.rmtree(folder, ignore_errors=True)


def stage_of(folder: Path, condition: str, **row: object) -> Stage:
    """A stage whose tests fail unless `condition` holds; it may look at `was_there` and `case`."""
    folder.mkdir(exist_ok=True)
    (folder / "test_it.py").write_text(TESTS.format(name="it", condition=condition))
    # Names of tests are relative to the folder; few plugins load fast.
    python = f"cd {folder} && PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONPATH={ROOT} {sys.executable} -m pytest"
    command = f"{python} -q -p tests.stages.report -p no:cacheprovider -c /dev/null --rootdir . ${{TESTS:-.}}"
    return Stage(name="it", command=command, **{"limit_minutes": 1.0, **row})  # type: ignore[arg-type]


def outcome_of(stage: Stage) -> Result:
    return run_stage(stage, runs_all=True)


def test_what_passes_is_green_and_its_digest_is_kept(tmp_path: Path, marks: Path) -> None:
    stage = stage_of(tmp_path / "tests", "True", depends_on=("tests/stages/*.py",))
    assert outcome_of(stage).outcome is Outcome.GREEN
    assert (marks / "it").read_text() == f"{stage.digest()}\n"
    left_out = run_stage(stage, runs_all=False)
    assert left_out.outcome is Outcome.LEFT_OUT
    assert "green/it" in left_out.note
    assert outcome_of(stage).outcome is Outcome.GREEN


def test_what_passes_alone_is_unsteady_by_name_and_keeps_no_digest(tmp_path: Path, marks: Path) -> None:
    stage = stage_of(tmp_path / "tests", "was_there", depends_on=("tests/stages/*.py",))
    result = outcome_of(stage)
    assert result.outcome is Outcome.UNSTEADY
    assert [name.partition("[")[2] for name in result.unsteady] == ["a b]", "$HOME 'quoted']", "[x]]"]
    assert not (marks / "it").exists()


def test_what_fails_twice_is_red_beside_what_is_unsteady(tmp_path: Path) -> None:
    result = outcome_of(stage_of(tmp_path / "tests", "was_there and case != 'a b'"))
    assert result.outcome is Outcome.RED
    assert [name.partition("[")[2] for name in result.failed] == ["a b]"]
    assert len(result.unsteady) == 2


def test_what_is_skipped_at_the_second_time_has_not_passed(tmp_path: Path) -> None:
    result = outcome_of(stage_of(tmp_path / "tests", "was_there and pytest.skip('not now')"))
    assert (result.outcome, len(result.failed)) == (Outcome.RED, 3)


def test_many_failures_are_no_accident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MAX_AGAIN", 2)
    result = outcome_of(stage_of(tmp_path / "tests", "was_there"))
    assert result.outcome is Outcome.RED
    assert result.note == "3 tests failed; more than 2 are not run again"


def told(status: int, **more: object) -> str:
    """A command that reports as a run of tests does, and ends as make would."""
    line = json.dumps({"status": status, "failed": [], "num_passed": 0, "is_whole": True} | more)
    return f"echo '{line}' >$STAGE_REPORT; exit {min(status, 1)}"


@pytest.mark.parametrize(
    ("command", "note"),
    [
        ("exit 3", "status 3"),
        # No tests were told of.
        ("kill -9 $$", "status -9"),
        # Pytest itself has ended in another way than by failures.
        (told(3, failed=["a"], num_passed=1), "status 1"),
        # Tests were left, as by a worker that crashed too often.
        (told(1, failed=["a"], num_passed=1, is_whole=False), "status 1"),
        (told(0), "no test passed"),
    ],
)
def test_what_says_nothing_of_its_tests_is_red_at_once(command: str, note: str) -> None:
    result = outcome_of(Stage(name="it", command=command, limit_minutes=1.0))
    assert (result.outcome, result.note) == (Outcome.RED, note)


def test_a_stage_that_outlives_its_limit_is_red() -> None:
    result = outcome_of(Stage(name="it", command="sleep 600", limit_minutes=1 / 120))
    assert (result.outcome, result.note) == (Outcome.RED, "not at its end after 0.00833333 minutes")


def test_a_command_that_is_ended_takes_along_what_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    process = commands.start(f"sleep 600 & echo $! >{pid}; wait", ROOT)
    while not pid.exists() or not pid.read_text():
        time.sleep(0.01)
    assert commands.wait(process, 0.0) is None
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(pid.read_text())).wait(timeout=30)


def test_what_make_was_told_does_not_reach_the_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Makefile").write_text("inner:\n\t@echo '$(TESTS)' '$(WORKERS)' '$(ARGS)' '$(PYTEST_ARGS)'\n")
    # As of `make test ARGS=unit WORKERS=3 TESTS=... PYTEST_ARGS=-x`.
    monkeypatch.setenv("MAKEFLAGS", " -- ARGS=unit WORKERS=3 TESTS=theirs PYTEST_ARGS=-x")
    for name, value in {"ARGS": "unit", "WORKERS": "3", "TESTS": "theirs", "PYTEST_ARGS": "-x"}.items():
        monkeypatch.setenv(name, value)
    with (tmp_path / "said").open("wb") as output:
        process = commands.start("make inner", tmp_path, {"TESTS": "@f", "WORKERS": "0"}, output)
        assert commands.wait(process, 60) == 0
    assert (tmp_path / "said").read_text() == "@f 0  -x\n"


def test_a_red_run_takes_the_mark_of_an_earlier_green_one(tmp_path: Path, marks: Path) -> None:
    flag = tmp_path / "flag"
    row = {"limit_minutes": 1.0, "depends_on": ("tests/stages/*.py",)}
    stage = Stage(name="it", command=f"! test -e {flag}", **row)  # type: ignore[arg-type]
    assert outcome_of(stage).outcome is Outcome.GREEN
    assert run_stage(stage, runs_all=False).outcome is Outcome.LEFT_OUT
    flag.touch()
    assert outcome_of(stage).outcome is Outcome.RED
    assert run_stage(stage, runs_all=False).outcome is Outcome.RED


def test_what_the_machine_lacks_is_left_out_with_its_reason() -> None:
    needs = "echo one; echo 'no engine' >&2; exit 1"
    result = outcome_of(Stage(name="it", command="exit 1", limit_minutes=1.0, needs=needs))
    assert (result.outcome, result.note) == (Outcome.LEFT_OUT, "not to be had here: no engine")


def repository(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return folder


def test_a_digest_knows_content_names_modes_and_the_row(tmp_path: Path) -> None:
    root = repository(tmp_path, {"a/x.py": "1", "a/b/y.py": "2", "a/b/z.md": "3", ".gitignore": "*.log\n"})
    stage = Stage(name="it", command="true", limit_minutes=1.0, depends_on=("a/**", "!**/*.md"))
    assert table.files(stage.depends_on, root) == ["a/b/y.py", "a/x.py"]
    assert table.files(("a/*",), root) == ["a/x.py"]
    digests = [stage.digest(root)]

    def changed(change: object = None) -> None:
        digests.append(stage.digest(root))

    changed((root / "a/x.py").write_text("4"))
    changed((root / "a/x.py").rename(root / "a/w.py"))
    changed((root / "a/w.py").chmod(0o755))
    changed((root / "a/b/y.py").unlink())
    assert len(set(digests)) == 5
    (root / "a/b/z.md").write_text("5")
    (root / "a/run.log").write_text("6")
    assert stage.digest(root) == digests[-1]
    row = Stage(name="it", command="false", limit_minutes=1.0, depends_on=stage.depends_on)
    assert row.digest(root) != digests[-1]


def test_the_closing_table_names_all_and_the_file_has_what_is_unsteady(tmp_path: Path) -> None:
    results = [
        Result("unit", Outcome.UNSTEADY, 61.4, unsteady=("tests/a.py::test_b",)),
        Result("e2e", Outcome.RED, 5, failed=("tests/c.py::test_d",)),
        Result("arm", Outcome.LEFT_OUT, 0, "its files are those of .ci/green/arm"),
    ]
    text = closing.write(results, ["unit", "e2e", "arm", "vllm"], 70, tmp_path)
    assert text.splitlines()[1:] == [
        "stages:",
        "  unit  unsteady  1:01",
        "      unsteady: tests/a.py::test_b",
        "  e2e   red       0:05",
        "      failed: tests/c.py::test_d",
        "  arm   left out  0:00  its files are those of .ci/green/arm",
        "  vllm  not run",
        "  all   red       1:10",
    ]
    assert (tmp_path / "build/unsteady.txt").read_text() == "unit tests/a.py::test_b\n"


def run_table(folder: Path, rows: str, *names: str) -> subprocess.CompletedProcess[str]:
    """What a process prints that runs a table of this test's own."""
    (folder / "table.toml").write_text(rows)
    program = f"""
import pathlib, sys
from tests.stages import __main__ as stages, table
folder = pathlib.Path({str(folder)!r})
stages.read_table = lambda: table.read_table(folder / "table.toml")
stages.ROOT = folder
sys.exit(stages.main(sys.argv[1:]))
"""
    return subprocess.run(
        [sys.executable, "-c", program, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def words_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Stage and outcome of each line of the closing table."""
    lines = done.stdout.partition("\nstages:\n")[2].splitlines()
    return [" ".join(line.split()[:2]) for line in lines]


def test_who_is_ended_tells_how_far_it_came_and_leaves_nothing(tmp_path: Path) -> None:
    """As by a limit of whoever runs `.ci/run`: the table is the last thing that is printed then, too."""
    done = run_table(
        tmp_path,
        f"""
[first]
command = "true"
limit_minutes = 1
[second]
command = "sleep 600 & echo $! >{tmp_path}/pid; kill -TERM $PPID; wait"
after = "touch {tmp_path}/after"
limit_minutes = 1
[third]
command = "true"
limit_minutes = 1
""",
    )
    assert done.returncode == 128 + 15, done.stderr
    assert words_of(done) == ["first green", "second red", "third not", "all red"]
    assert (tmp_path / "after").exists()
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "pid").read_text())).wait(timeout=30)


def test_no_stage_runs_on_a_broken_foundation(tmp_path: Path) -> None:
    rows = f"""
[first]
command = "true"
limit_minutes = 1
[second]
command = "exit 1"
limit_minutes = 1
[third]
command = "exit 1"
is_foundation = true
limit_minutes = 1
[fourth]
command = "touch {tmp_path}/never"
limit_minutes = 1
"""
    done = run_table(tmp_path, rows)
    assert words_of(done) == ["first green", "second red", "third red", "fourth red", "all red"]
    assert done.returncode == 1
    assert "not run: third is red" in done.stdout
    assert not (tmp_path / "never").exists()
    assert words_of(run_table(tmp_path, rows, "first")) == ["first green", "all green"]
    assert "known are first, second" in run_table(tmp_path, rows, "fifth").stdout


@pytest.mark.parametrize("stage", read_table(), ids=lambda stage: stage.name)
def test_every_glob_of_the_table_matches_a_file(stage: Stage) -> None:
    assert [glob for glob in stage.depends_on if not table.files((glob.removeprefix("!"),))] == []


def test_a_row_with_a_key_too_much_is_named(tmp_path: Path) -> None:
    (tmp_path / "table.toml").write_text('[it]\ncommand = "true"\nlimit = 1\n')
    with pytest.raises(ValueError, match=r"\[it\] has limit; known are"):
        read_table(tmp_path / "table.toml")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("broken", "is_whole"), [("raise ValueError", False), ("", True)])
def test_a_report_is_whole_where_everything_was_collected(
    tmp_path: Path, workers: int, broken: str, is_whole: bool
) -> None:
    (tmp_path / "test_a.py").write_text("def test_a(): assert 0\ndef test_b(): pass\n")
    (tmp_path / "test_b.py").write_text(f"{broken}\ndef test_c(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.stages.report", "-p", "xdist"]
    subprocess.run(
        [*command, "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", ".", "-n", str(workers)],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": str(ROOT),
            "STAGE_REPORT": str(tmp_path / "report"),
        },
        capture_output=True,
        check=False,
    )
    line = json.loads((tmp_path / "report").read_text())
    assert line["is_whole"] is is_whole or line["status"] == 2
    assert (line["status"] in (0, 1) and line["is_whole"]) is is_whole
    assert any("test_a" in name or "test_b.py" in name for name in line["failed"])


def test_workers_that_crash_too_often_leave_no_whole_report(tmp_path: Path) -> None:
    crash = (
        "import os, pytest\n@pytest.mark.parametrize('i', range(30))\ndef test_it(i): i % 2 or os._exit(1)\n"
    )
    (tmp_path / "test_a.py").write_text(crash)
    command = (
        f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONPATH={ROOT} {sys.executable} -m pytest -q -n 1 -p xdist"
    )
    command = (
        f"cd {tmp_path} && {command} -p tests.stages.report -p no:cacheprovider -c /dev/null --rootdir ."
    )
    result = outcome_of(Stage(name="it", command=command, limit_minutes=2.0))
    assert (result.outcome, result.unsteady) == (Outcome.RED, ())
