"""Every benchmark of the engine, one after another, and one table of what they say.

Each runs in a process of its own and writes its JSON; the table takes its figures from there. Those on the
simulated device under a virtual clock do not depend on the machine; the others want it for themselves.

    python -m benchmarks.engine.all [--json FOLDER] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Rows = list[dict[str, Any]]
# (what, baseline, ours), as text.
Line = tuple[str, str, str]


def _pair(rows: Rows, key: str, unit: str, *, first: int = 0, last: int = -1) -> Line:
    return key, f"{rows[first][key]:.3g} {unit}", f"{rows[last][key]:.3g} {unit}"


def _convoy(rows: Rows) -> list[Line]:
    return [
        _pair(rows, "chat ITL p99 ms", "ms"),
        _pair(rows, "chat TTFT p99 ms", "ms"),
        _pair(rows, "KV waste %", "%"),
    ]


def _fairness(rows: Rows) -> list[Line]:
    return [_pair(rows, "quiet TTFT p99 s", "s"), _pair(rows, "quiet served of asked %", "%")]


def _tiers(rows: Rows) -> list[Line]:
    half = len(rows) // 2
    lines = []
    for flat, ours in zip(rows[:half], rows[half:], strict=True):
        asked = ours["asked"]
        lines.append(
            (
                f"{ours['tier']}: TTFT p99 (target {ours['target s']:g} s), refused at once, dropped",
                f"{flat['TTFT p99 s']:.3g} s, 0 of {asked}, 0",
                f"{ours['TTFT p99 s']:.3g} s, {ours['refused at once']} of {asked}, "
                f"{ours['accepted, then dropped']}",
            )
        )
    return lines


def _prefix(rows: Rows) -> list[Line]:
    return [
        _pair(rows, "TTFT p50 ms", "ms"),
        _pair(rows, "TTFT p99 ms", "ms"),
        _pair(rows, "KV waste %", "%"),
    ]


def _burst(rows: Rows) -> list[Line]:
    ours = next(index for index, row in enumerate(rows) if row["steps"].startswith("ours"))
    return [
        _pair(rows, "longest gap ms", "ms", last=ours),
        _pair(rows, "TTFT p99 s", "s", last=ours),
    ]


def _invariance(rows: Rows) -> list[Line]:
    plain, ours = (f"{row['same tokens alone and together']} of {row['requests']}" for row in rows)
    return [("bfloat16, same tokens alone and among 31 others", plain, ours)]


def _overlap(rows: Rows) -> list[Line]:
    return [
        (
            f"tokens/s, steps of {plain['step ms']:g} ms",
            f"{plain['tokens/s']:.3g}",
            f"{ours['tokens/s']:.3g} (+{ours['speed-up %']:.1f} %)",
        )
        for plain, ours in zip(rows[::2], rows[1::2], strict=True)
    ]


def _speculation(rows: Rows) -> list[Line]:
    lines = []
    baseline: dict[str, Any] = {}
    for row in rows:
        if row["configuration"].startswith("baseline"):
            baseline = row
            continue
        name = f"{row['prompts']}, batch {row['batch']}, {row['configuration']}: steps, tokens/s"
        lines.append(
            (
                name,
                f"{baseline['steps']}, {baseline['tokens per second']:.3g}",
                f"{row['steps']}, {row['tokens per second']:.3g} ({row['accepted %']:.0f} % accepted)",
            )
        )
    return lines


def _walk(rows: Rows) -> list[Line]:
    plain, ours, _ = rows
    return [
        (
            f"{name}",
            str(plain[name]),
            str(ours[name]),
        )
        for name in ("requests", "failed steps", "preemptions", "blocks not back", "runner states left")
    ]


def _window(rows: Rows) -> list[Line]:
    return [
        (
            f"blocks held at 4,096 tokens, prompt of {kept['prompt tokens']}",
            str(kept["blocks held at 4,096 tokens"]),
            str(ours["blocks held at 4,096 tokens"]),
        )
        for kept, ours in zip(rows[::2], rows[1::2], strict=True)
    ]


def _waves(rows: Rows) -> list[Line]:
    return [
        (
            f"tokens/s, ITL p99, {ours['clients']} clients with {ours['requests each']} requests each",
            f"{whole['output tokens/s']:.3g}, {whole['ITL p99 ms']:.3g} ms",
            f"{ours['output tokens/s']:.3g}, {ours['ITL p99 ms']:.3g} ms",
        )
        for whole, ours in zip(rows[::2], rows[1::2], strict=True)
    ]


def _process_split(rows: Rows) -> list[Line]:
    return [
        (
            f"tokens/s, {one['work of a step ms']:g} ms of work a step",
            f"{one['tokens/s']:.3g}",
            f"{two['tokens/s']:.3g}",
        )
        for one, two in zip(rows[::2], rows[1::2], strict=True)
    ]


BENCHMARKS: dict[str, Callable[[Rows], list[Line]]] = {
    "burst": _burst,
    "waves": _waves,
    "convoy": _convoy,
    "fairness": _fairness,
    "tiers": _tiers,
    "prefix": _prefix,
    "walk": _walk,
    "window": _window,
    "overlap": _overlap,
    "invariance": _invariance,
    "speculation": _speculation,
    "process_split": _process_split,
}


def main() -> None:
    """Runs what is asked for; exit code 1 when one of them failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=None, help="folder for the figures")
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    options = parser.parse_args()
    table = Table(title="The engine's benchmarks")
    for column in ("benchmark", "figure", "baseline", "ours"):
        table.add_column(column)
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.only:
            path = (options.json or Path(scratch)) / f"engine_{name}.json"
            began = time.monotonic()
            command = [sys.executable, "-m", f"benchmarks.engine.{name}", "--json", str(path)]
            done = subprocess.run(
                command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            if done.returncode:
                failed.append(name)
                print(done.stdout, file=sys.stderr)
                continue
            lines = BENCHMARKS[name](json.loads(path.read_text())["rows"])
            for number, line in enumerate(lines):
                table.add_row("" if number else f"{name} ({time.monotonic() - began:.0f} s)", *line)
            table.add_section()
    Console(width=170).print(table)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
