"""A plugin of pytest that tells a stage how a run of tests ended, through the file that STAGE_REPORT names.

One line of JSON for each run: pytest's exit status, the tests that failed, how many passed, and whether all
have run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

# Taken out of the environment at once: neither workers nor tests that start pytest report for this run.
PATH = os.environ.pop("STAGE_REPORT", "")


def pytest_configure(config: pytest.Config) -> None:
    """Reports from the process that hears of all tests."""
    if PATH and not hasattr(config, "workerinput"):
        config.pluginmanager.register(StageReport(Path(PATH)))


def tell(path: Path, status: int, failed: list[str], num_passed: int, *, is_whole: bool = True) -> None:
    """Appends the line of one run; `is_whole` as in `tests.stages.run.Report`."""
    told = {"status": status, "failed": failed, "num_passed": num_passed, "is_whole": is_whole}
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{json.dumps(told)}\n")


class StageReport:
    """Collects what pytest says of its tests."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_collected = 0
        self._has_uncollected = False
        self._ended: set[str] = set()
        self._failed: dict[str, None] = {}
        self._passed: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without workers: what will run."""
        self._num_collected = max(self._num_collected, len(getattr(session, "items", ())))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """With workers: each collects all of it."""
        self._num_collected = max(self._num_collected, len(ids))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test fails in its call, or in what it needs before or leaves after, or with its worker."""
        self._ended.add(report.nodeid)
        if report.failed:
            self._failed[report.nodeid] = None
        elif report.passed and report.when == "call":
            self._passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected counts by its own name."""
        if report.failed:
            self._has_uncollected = True
            self._failed[report.nodeid] = None

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """The run is over. Workers that crash often are not replaced, and leave tests that nobody runs."""
        is_whole = not self._has_uncollected and len(self._ended) >= self._num_collected
        num_passed = len(self._passed - self._failed.keys())
        tell(self._path, int(exitstatus), list(self._failed), num_passed, is_whole=is_whole)
