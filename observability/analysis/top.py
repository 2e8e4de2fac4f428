"""`millrace top --target NAME=HOST:PORT ...`, or `--prometheus URL`: engines, tiers and rates, live.

NAME begins with the service: gateway-0, engine-1, tokenizer. A Prometheus is asked for the last minute.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from observability.analysis.prometheus import PrometheusReader
from observability.analysis.scrape import Interval, Reading, scrape
from observability.analysis.source import StoreError
from observability.analysis.terminal import console_width, table
from observability.emit import names

Intervals = Mapping[str, Interval]
# Window of the rates that a Prometheus is asked for, in seconds: several of its readings.
_LEAST_WINDOW_S = 60.0


def render(intervals: Intervals) -> RenderableType:
    """Three tables over one interval: what runs, the tiers, the engines."""
    gateways = [interval for name, interval in intervals.items() if name.startswith(names.GATEWAY)]
    engines = {name: interval for name, interval in intervals.items() if name.startswith(names.ENGINE)}
    parts: list[RenderableType] = [
        _summary(gateways, list(engines.values())),
        _tiers(gateways),
        _engines(engines),
    ]
    away = [f"{name}: {interval.after.error}" for name, interval in intervals.items() if interval.after.error]
    if away:
        parts.append(Text("no answer from " + ", ".join(away), style="bold red"))
    return Group(*parts)


def _summary(gateways: Sequence[Interval], engines: Sequence[Interval]) -> RenderableType:
    requests = sum(each.rate(names.REQUESTS) for each in gateways)
    refused = sum(each.rate(names.REJECTIONS) for each in gateways)
    tokens = sum(each.rate(names.TOKENS, kind="completion") for each in gateways)
    active = sum(each.after.value(names.ACTIVE_STREAMS) for each in gateways)
    waiting = sum(each.after.value(names.REQUESTS_WAITING) for each in engines)
    return Text.assemble(
        (f"{requests:.1f}", "bold"),
        " requests/s  ",
        (f"{tokens:.0f}", "bold"),
        " tokens/s  ",
        (f"{active:.0f}", "bold"),
        " active  ",
        (f"{waiting:.0f}", "bold"),
        " waiting  ",
        (f"{refused:.1f}", "bold red" if refused else "bold"),
        " refused/s\n",
    )


def _tiers(gateways: Sequence[Interval]) -> RenderableType:
    rows = table("tier", "active", "TTFT p50", "TTFT p95", "TPOT p50", "met %", "refused/s")
    tiers = sorted(
        {
            tier
            for each in gateways
            for metric in (names.REQUESTS, names.ACTIVE_STREAMS, names.REJECTIONS)
            for tier in each.after.values_by(metric, "tier")
            if tier
        }
    )
    for tier in tiers:
        judged = sum(each.rate(names.SLO, tier=tier) for each in gateways)
        met = sum(each.rate(names.SLO, tier=tier, met="true") for each in gateways)
        rows.add_row(
            tier,
            f"{sum(each.after.value(names.ACTIVE_STREAMS, tier=tier) for each in gateways):.0f}",
            _milliseconds(each.percentile(names.TTFT, 0.5, tier=tier) for each in gateways),
            _milliseconds(each.percentile(names.TTFT, 0.95, tier=tier) for each in gateways),
            _milliseconds(each.percentile(names.TPOT, 0.5, tier=tier) for each in gateways),
            f"{100 * met / judged:.0f}" if judged else "-",
            f"{sum(each.rate(names.REJECTIONS, tier=tier) for each in gateways):.1f}",
        )
    return rows


def _engines(engines: Intervals) -> RenderableType:
    rows = table(
        "engine", "running", "waiting", "oldest s", "KV %", "hit %", "step p50", "tokens/s", "preempted/s"
    )
    for name, each in engines.items():
        now = each.after
        queries, hits = each.rate(names.PREFIX_QUERIES), each.rate(names.PREFIX_HITS)
        usage = now.value(names.KV_USAGE)
        rows.add_row(
            name,
            f"{now.value(names.REQUESTS_RUNNING):.0f}",
            f"{now.value(names.REQUESTS_WAITING):.0f}",
            f"{now.value(names.OLDEST_WAIT):.1f}",
            Text(f"{100 * usage:.0f}", style="red" if usage > 0.95 else ""),
            f"{100 * hits / queries:.0f}" if queries else "-",
            _milliseconds([each.percentile(names.STEP_SECONDS, 0.5)]),
            f"{each.rate(names.GENERATED_TOKENS):.0f}",
            f"{each.rate(names.PREEMPTIONS):.1f}",
        )
    return rows


def _milliseconds(seconds: Iterable[float | None]) -> str:
    """The worst of the gateways; "-" when nothing was observed."""
    known = [value for value in seconds if value is not None]
    return f"{1000 * max(known):.0f}" if known else "-"


async def _from_endpoints(targets: Mapping[str, str], interval_s: float) -> AsyncIterator[Intervals]:
    before: dict[str, Reading] = await scrape(targets)
    while True:
        await asyncio.sleep(interval_s)
        after = await scrape(targets)
        yield {name: Interval(before[name], after[name]) for name in targets}
        before = after


async def _from_prometheus(url: str, interval_s: float) -> AsyncIterator[Intervals]:
    reader = PrometheusReader(url)
    try:
        while True:
            # It reads its targets several times a minute, so a shorter time would hold nothing.
            yield await asyncio.to_thread(reader.intervals, max(interval_s, _LEAST_WINDOW_S))
            await asyncio.sleep(interval_s)
    finally:
        reader.close()


async def watch(views: AsyncIterator[Intervals], *, once: bool) -> None:
    """Draws until interrupted, or one interval alone."""
    # A page's width when the output is piped; rich asks the terminal otherwise.
    console = Console(width=None if sys.stdout.isatty() else console_width(), highlight=False)
    with Live(console=console, auto_refresh=False, transient=False) as live:
        async for intervals in views:
            live.update(render(intervals), refresh=True)
            if once:
                break
    if not console.is_terminal:
        # The live view writes no newline after its last line into a pipe.
        console.print()


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 for a Prometheus that does not answer; 2 for no targets, or one that cannot be read."""
    parser = argparse.ArgumentParser(prog="millrace top", description=__doc__)
    parser.add_argument("--target", action="append", default=[], metavar="NAME=HOST:PORT")
    parser.add_argument(
        "--prometheus", default="", metavar="URL", help="ask a deployment's, as http://127.0.0.1:9090"
    )
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two looks")
    parser.add_argument("--once", action="store_true", help="print one interval and end")
    parsed = parser.parse_args(arguments)
    if not (parsed.target or parsed.prometheus):
        print(
            "nothing to look at: no stack runs here (millrace up); or name endpoints by --target",
            file=sys.stderr,
        )
        return 2
    targets = dict(text.partition("=")[::2] for text in parsed.target)
    for name, address in targets.items():
        if not (name and address.rpartition(":")[2].isdigit()):
            print(f"--target {name}={address}: expected NAME=HOST:PORT", file=sys.stderr)
            return 2
    views = (
        _from_prometheus(parsed.prometheus, parsed.interval)
        if parsed.prometheus
        else _from_endpoints(targets, parsed.interval)
    )
    try:
        # Until Ctrl-C.
        with suppress(KeyboardInterrupt):
            asyncio.run(watch(views, once=parsed.once))
    except StoreError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
