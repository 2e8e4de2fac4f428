"""Prometheus itself, and promtool: pages, rules, dashboards."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from report import ENVIRONMENT, OUT, ROOT, works

# Addresses of /metrics by process.
PAGES: dict[str, str] = json.loads(os.environ["CLIENTS_METRICS"])
RULES = ROOT / "observability" / "prometheus" / "alerts.yml"
DASHBOARDS = sorted((ROOT / "observability" / "grafana" / "dashboards").glob("*.json"))
LIMIT_S = 60.0


def program(name: str) -> str:
    """Of the package unpacked here, or the machine's."""
    unpacked = ENVIRONMENT / "usr" / "bin" / name
    return str(unpacked) if unpacked.exists() else shutil.which(name) or name


def promtool(*arguments: str, page: str = "") -> str:
    """What promtool says; raises with it when it is not content."""
    done = subprocess.run(
        [program("promtool"), *arguments], input=page, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    return done.stdout


def page_of(address: str) -> str:
    """A page as plain text."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as response:
        return response.read().decode()


@contextmanager
def prometheus() -> Iterator[str]:
    """A server that scrapes every process each second: its URL."""
    jobs = [
        {"job_name": re.sub(r"\W?\d+$", "", name), "targets": [address]} for name, address in PAGES.items()
    ]
    merged: dict[str, list[str]] = {}
    for job in jobs:
        merged.setdefault(job["job_name"], []).extend(job["targets"])
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": name, "static_configs": [{"targets": targets}]} for name, targets in merged.items()
        ],
    }
    (OUT / "prometheus.yml").write_text(json.dumps(configuration), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [program("prometheus"), f"--config.file={OUT / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={OUT / 'data'}", f"--web.listen-address={address}"]
    process = subprocess.Popen(command)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


def asked(url: str, path: str, **parameters: str) -> dict:
    """An answer of Prometheus's API."""
    query = urllib.parse.urlencode(parameters)
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{query}", timeout=30) as response:
        return json.load(response)["data"]


def scraped(url: str) -> None:
    """Waits until every process was scraped."""
    ends_s, targets = time.monotonic() + LIMIT_S, []
    while time.monotonic() < ends_s:
        try:
            targets = asked(url, "targets", state="active")["activeTargets"]
        except OSError:
            targets = []
        if len(targets) == len(PAGES) and all(each["health"] == "up" for each in targets):
            return
        time.sleep(0.5)
    raise AssertionError(f"not scraped: {[(each['scrapeUrl'], each['lastError']) for each in targets]}")


def expressions() -> list[str]:
    """Of all dashboards, with values for Grafana's variables."""
    found = [
        target["expr"]
        for path in DASHBOARDS
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]
        for target in panel.get("targets", ())
    ]
    variables = {r"\$__(rate_)?interval": "1m", r"\$__range": "1h", r"\$\{?\w+(:\w+)?\}?": ".*"}
    for variable, value in variables.items():
        found = [re.sub(variable, value, each) for each in found]
    return found


with works("pages that promtool has nothing against"):
    for name, address in PAGES.items():
        said = promtool("check", "metrics", page=page_of(address))
        assert not said, f"{name}: {said}"
with works("rules that promtool has nothing against"):
    promtool("check", "rules", str(RULES))
with prometheus() as url:
    with works("scraped"):
        scraped(url)
    with works("types and help"):
        told = {name: each for name, each in asked(url, "metadata").items() if name.startswith("millrace_")}
        assert told, "no metric of ours"
        bare = [name for name, each in told.items() if not each[0]["help"] or each[0]["type"] == "unknown"]
        assert not bare, bare
    with works("dashboards"):
        assert expressions()
        for expression in expressions():
            asked(url, "query", query=expression)
    with works("what was asked is counted"):
        (counted,) = asked(url, "query", query="sum(millrace_requests_total)")["result"]
        assert float(counted["value"][1]) > 0
