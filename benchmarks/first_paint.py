"""How soon does the page at /ui show something, beside a model that works?

`python -m benchmarks.first_paint [--loads 15] [--streams 8] [--model models/millrace-nano] [--json ...]`

Starts a stack with the model, and opens /ui/ in headless Chromium, each time in a browser of its own, whose
cache is empty: first with an idle engine, then beside streams of long answers that keep it busy. In turn with
it, a page of a few bytes of text from the same gateway: what browser and machine take for any
page. Prints the times to the first paint, to the first paint of content, and until the page is loaded, in
milliseconds from when it was asked for, and the bytes that came. The aim is a first paint within 300 ms
beside the model. Browser, engine, gateway and the streams' readers share this machine's cores. Needs Chromium
and curl (apt-get install chromium curl).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.engine.report import Row, options, percentile, publish
from benchmarks.stack import RunningStack, running_stack
from tests.e2e.browser import CHROMIUM, browser

AIM_MS = 300.0
BARE, PAGE = "/health", "/ui/"
_CONFIG = "[gateway]\n"
_FIGURES = """(() => {
  const [load] = performance.getEntriesByType("navigation");
  const paints = performance.getEntriesByType("paint").map((each) => [each.name, each.startTime]);
  const paint = Object.fromEntries(paints);
  const all = [load, ...performance.getEntriesByType("resource")];
  return { first: paint["first-paint"], content: paint["first-contentful-paint"], loaded: load.loadEventEnd,
    bytes: all.reduce((sum, each) => sum + each.decodedBodySize, 0) };
})()"""
_PAINTED = "performance.getEntriesByName('first-contentful-paint').length && " + (
    "performance.getEntriesByType('navigation')[0].loadEventEnd > 0"
)


@contextmanager
def busy(stack: RunningStack, num_streams: int) -> Iterator[None]:
    """Keeps as many streams under way as long as the block lasts; returns once each has begun.

    Each is read by curl, because readers in Python take as much of a processor as the gateway: clients are on
    the page's machine here, and the page is what is measured.
    """
    state = stack.state
    body = {
        "model": state.model,
        "prompt": "Once upon",
        "stream": True,
        "max_tokens": 500,
        "ignore_eos": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "request.curl"
        told.write_text(
            f'url = "{stack.url}/v1/completions"\n'
            f'header = "authorization: Bearer {state.api_key}"\n'
            'header = "content-type: application/json"\n'
            f"data = {json.dumps(json.dumps(body))}\n"
            "no-buffer\nsilent\nfail-with-body\n"
        )
        answers = [Path(folder) / f"{number}.txt" for number in range(num_streams)]
        readers = [
            subprocess.Popen(
                ["sh", "-c", 'while curl --config "$0" --output "$1"; do :; done', told, answer],
                start_new_session=True,
            )
            for answer in answers
        ]
        try:
            for reader, answer in zip(readers, answers, strict=True):
                while not answer.exists() or not answer.stat().st_size:
                    if reader.poll() is not None:
                        raise SystemExit("the engine refused to work, or curl is not installed")
                    time.sleep(0.05)
            if refused := [text for each in answers if (text := each.read_text()).startswith("{")]:
                raise SystemExit(f"the engine refused to work: {refused[0]}")
            yield
        finally:
            for reader in readers:
                os.killpg(reader.pid, signal.SIGKILL)
                reader.wait()


def load(stack: RunningStack, path: str) -> dict[str, float]:
    """Figures of one load by a browser that has never been here."""
    # A browser that has ended may still write to its profile.
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        browser(Path(folder) / "profile") as page,
    ):
        page.resize(1280)
        page.open(f"{stack.url}{path}")
        page.wait(_PAINTED)
        return dict(page.run(_FIGURES))


def in_turns(stack: RunningStack, engine: str, count: int) -> list[Row]:
    """A row for each page, of `count` loads."""
    found: dict[str, list[dict[str, float]]] = {path: [] for path in (BARE, PAGE)}
    for _ in range(count):
        for path, figures in found.items():
            figures.append(load(stack, path))
    return [row(engine, path, figures) for path, figures in found.items()]


def row(engine: str, path: str, found: list[dict[str, float]]) -> Row:
    """One line of the table."""
    figures: dict[str, str | float | int] = {"engine": engine, "page": path, "loads": len(found)}
    for key, title in (("first", "first paint"), ("content", "first content"), ("loaded", "loaded")):
        values = [each[key] for each in found]
        figures[f"{title} p50 ms"] = percentile(values, 0.5)
        figures[f"{title} max ms"] = max(values)
    figures["KB"] = max(each["bytes"] for each in found) / 1000
    return figures


def main() -> int:
    """See the module."""
    parser = options(__doc__)
    parser.add_argument("--loads", type=int, default=15)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--model", default="models/millrace-nano")
    arguments = parser.parse_args()
    if CHROMIUM is None:
        print("Chromium is not installed: apt-get install chromium", file=sys.stderr)
        return 2
    with running_stack(_CONFIG, "--model", arguments.model) as stack:
        # The first browser of a machine reads its program from the disk.
        load(stack, PAGE)
        rows = in_turns(stack, "idle", arguments.loads)
        with busy(stack, arguments.streams):
            rows += in_turns(stack, f"{arguments.streams} streams", arguments.loads)
    medians, longest = (float(rows[-1][f"first paint {which} ms"]) for which in ("p50", "max"))
    note = f"aim: first paint < {AIM_MS:g} ms: {_met(medians)} by the median, {_met(longest)} by the longest"
    publish("First paint of /ui", rows, arguments.json, note)
    return int(medians >= AIM_MS)


def _met(milliseconds: float) -> str:
    return "reached" if milliseconds < AIM_MS else "missed"


if __name__ == "__main__":
    sys.exit(main())
