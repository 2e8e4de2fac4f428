"""What every test shares: marks by folder, an environment without settings of the developer's shell, a report
for the stages of `.ci/run`, and `--fast`, which leaves out what took long when it last ran, here or where
slow.txt was written.
"""

from __future__ import annotations

import os
import ssl
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.stages import report

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:
    # On a machine for GPU work alone, where nothing that uses it is collected.
    pass
else:
    # A busy machine makes examples slow, not wrong. A test has the same examples until it is changed, so that
    # what is found belongs to the change; `make test-random` looks for others.
    _PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("random", _PATIENT, derandomize=False, max_examples=500)
    settings.register_profile("millrace", _PATIENT, derandomize=True)
    settings.load_profile("millrace")

# As services/cli/__init__.py sets it, and before gRPC is imported: tests fork beside its threads, too.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

_new_context = ssl.create_default_context
# Of these every HTTP client reads one.
_AUTHORITIES = {os.environ.get("SSL_CERT_FILE", "")}
try:
    import certifi
except ModuleNotFoundError:
    # There no HTTP client is either.
    pass
else:
    _AUTHORITIES.add(certifi.where())


@cache
def _context_of_public_authorities(path: str) -> ssl.SSLContext:
    return _new_context(cafile=path)


def _context(*arguments: Any, **options: Any) -> ssl.SSLContext:
    """Reads the public authorities once: that takes 60 ms, and each HTTP client of a test does it anew."""
    if not arguments and options.keys() == {"cafile"} and options["cafile"] in _AUTHORITIES:
        return _context_of_public_authorities(options["cafile"])
    return _new_context(*arguments, **options)


ssl.create_default_context = _context

TESTS = Path(__file__).resolve().parent
# Folders whose tests drive a running stack.
_E2E = (TESTS / "e2e", TESTS / "chaos")
# A test that took longer is none of the fast ones.
_FAST_S = 0.2
# In pytest's cache: names of the others, and the functions of all tests that ran.
_SLOW_TESTS, _MEASURED = "millrace/slow", "millrace/measured"
# Slow functions where a whole run was measured, for those that did not run here yet: `python -m tests.slow`.
_SLOW_FUNCTIONS = TESTS / "slow.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--fast`; every other run measures which tests are slow. `--every` is for emulated processors."""
    parser.addoption(
        "--fast", action="store_true", help=f"leave out tests that took over {_FAST_S} s when they last ran"
    )
    parser.addoption("--every", type=int, default=1, help="only each N-th case of every test function")


def pytest_configure(config: pytest.Config) -> None:
    """Measures, but not in a fast run: there, the first test that is left pays for what several share."""
    report.pytest_configure(config)
    cache = getattr(config, "cache", None)
    is_worker = hasattr(config, "workerinput")
    if cache is None or is_worker or config.getoption("--fast"):
        return
    config.pluginmanager.register(_Durations(cache))


class _Durations:
    """Remembers which of the tests that ran are slow."""

    def __init__(self, cache: pytest.Cache) -> None:
        self._cache = cache
        self._took_s: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._took_s[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        known = set(self._cache.get(_SLOW_TESTS, [])) - set(self._took_s)
        slow = {name for name, took_s in self._took_s.items() if took_s > _FAST_S}
        self._cache.set(_SLOW_TESTS, sorted(known | slow))
        functions = {name.partition("[")[0] for name in self._took_s}
        self._cache.set(_MEASURED, sorted(functions.union(self._cache.get(_MEASURED, []))))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks by place, so that no test of the running stack is forgotten."""
    for item in items:
        if any(folder in item.path.parents for folder in _E2E):
            item.add_marker(pytest.mark.e2e)
        if "vllm" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.vllm)
        if "quantizer" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.quantizer)
    _keep(config, items, _each(items, config.getoption("--every")))
    if config.getoption("--fast"):
        cache = getattr(config, "cache", None)
        slow, measured = (set(cache.get(key, []) if cache else []) for key in (_SLOW_TESTS, _MEASURED))
        slow |= set(_SLOW_FUNCTIONS.read_text().split()) - measured
        is_slow = {item: bool({item.nodeid, item.nodeid.partition("[")[0]} & slow) for item in items}
        _keep(config, items, {item for item in items if not is_slow[item]})


def _each(items: list[pytest.Item], step: int) -> set[pytest.Item]:
    """The first case of every test function and each `step`-th after it."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return {item for each in cases.values() for item in each[::step]}


def _keep(config: pytest.Config, items: list[pytest.Item], kept: set[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture(autouse=True, scope="session")
def _clean_environment() -> None:
    """Settings of the shell that starts pytest must not reach the code under test."""
    for name in [name for name in os.environ if name.startswith("MILLRACE_")]:
        del os.environ[name]
