"""What people see while a stack starts, and when it runs."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console

from services.supervisor.process import ChildProcess, ProcessSpec
from services.supervisor.report import StartReport, usage_examples


def started(*, terminal: bool) -> tuple[StartReport, Console]:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)
    return StartReport(console, ("engine-0", "envoy")), console


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_lines_tell_stages_once_and_readiness() -> None:
    report, console = started(terminal=False)
    with report:
        report.loading("engine-0", "load weights", 0.1)
        report.loading("engine-0", "load weights", 0.9)
        report.loading("envoy", "", 0.0)
        report.ready("engine-0")
        report.loading("engine-0", "late", 0.5)
    lines = text_of(console).splitlines()
    assert lines[0] == "  engine-0: load weights ..."
    assert lines[1].startswith("  engine-0 ready after ")
    assert len(lines) == 2


def test_terminal_shows_share_of_the_load() -> None:
    report, console = started(terminal=True)
    report.loading("engine-0", "load weights", 0.42)
    report.ready("envoy")
    console.print(report._table())
    assert "load weights 42%" in text_of(console)
    assert "✓" in text_of(console)


def test_loading_is_read_from_the_log(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    child = ChildProcess(ProcessSpec(name="engine-0", argv=(sys.executable,)), log, {})
    assert child.loading_stage() == ("", 0.0)
    for line, expected in (
        (
            '{"level": "info", "message": "loading", "stage": "load weights", "fraction": 0.5}',
            ("load weights", 0.5),
        ),
        ('{"level": "info", "message": "something else"}', ("", 0.0)),
        ("Traceback (most recent call last):", ("", 0.0)),
        ('{"stage": 3}', ("", 0.0)),
    ):
        log.write_text(f"{line}\n")
        assert child.loading_stage() == expected


def test_examples_name_address_key_and_model() -> None:
    shown = usage_examples("127.0.0.1:9", "k", "tiny")
    for part in ("http://127.0.0.1:9/v1", "Bearer k", 'api_key="k"', '"model": "tiny"', "millrace chat"):
        assert part in shown
