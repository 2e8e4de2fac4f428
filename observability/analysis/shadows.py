"""`millrace shadows --target NAME=HOST:PORT ...`: what other models would have answered, beside what was.

Reads the gateways' metrics, since each began.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from rich.console import Console

from observability.analysis.scrape import Reading, scrape
from observability.analysis.terminal import console_width, table
from observability.emit import names
from observability.emit.names import Metric

_OUTCOMES = ("same", "different", "failed", "late", "dropped")
_SIDES = ("live", "shadow")
# The total of a metric's samples, by suffix and labels.
_Total: TypeAlias = Callable[..., float]


def rows(readings: Sequence[Reading]) -> Iterable[tuple[str, ...]]:
    """A row for each pair of a name and a shadow: counts, agreement, and both sides' numbers."""
    pairs = sorted(
        {
            (dict(labels)["model"], dict(labels)["shadow"])
            for reading in readings
            for sample, labels in reading.samples
            if sample == names.SHADOW_REQUESTS.name
        }
    )
    for model, shadow in pairs:
        own = {"model": model, "shadow": shadow}

        def total(metric: Metric, suffix: str = "", own: dict[str, str] = own, **labels: str) -> float:
            return sum(
                value
                for reading in readings
                for (sample, found), value in reading.samples.items()
                if sample == metric.name + suffix and {**own, **labels}.items() <= dict(found).items()
            )

        counts = [total(names.SHADOW_REQUESTS, outcome=outcome) for outcome in _OUTCOMES]
        compared = total(names.SHADOW_AGREEMENT, "_count")
        agreement = total(names.SHADOW_AGREEMENT, "_sum") / compared if compared else None
        sides = [_share(total, side) for side in _SIDES]
        for metric in (names.SHADOW_TTFT, names.SHADOW_TPOT):
            sides += [_mean_ms(total, metric, side) for side in _SIDES]
        cost = [f"{total(names.SHADOW_COST, side=side):.6g}" for side in _SIDES]
        shown = "-" if agreement is None else f"{agreement:.1%}"
        yield (model, shadow, *(f"{count:.0f}" for count in counts), shown, *_pairs([*sides, *cost]))


def _share(total: _Total, side: str) -> str:
    valid, judged = (
        total(names.SHADOW_OUTPUTS, side=side, valid="true"),
        total(names.SHADOW_OUTPUTS, side=side),
    )
    return f"{valid / judged:.0%}" if judged else "-"


def _mean_ms(total: _Total, metric: Metric, side: str) -> str:
    count = total(metric, "_count", side=side)
    return f"{1000 * total(metric, '_sum', side=side) / count:.1f}" if count else "-"


def _pairs(values: Sequence[str]) -> list[str]:
    return [f"{live} / {shadow}" for live, shadow in zip(values[::2], values[1::2], strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 1 when no gateway answers."""
    parser = argparse.ArgumentParser(prog="millrace shadows", description=__doc__)
    parser.add_argument("--target", action="append", default=[], help="NAME=HOST:PORT of a gateway's metrics")
    targets = dict(each.split("=", 1) for each in parser.parse_args(arguments).target if "=" in each)
    gateways = {name: address for name, address in targets.items() if name.startswith(names.GATEWAY)}
    readings = [each for each in asyncio.run(scrape(gateways)).values() if not each.error]
    console = Console(width=console_width())
    if not readings:
        console.print("no gateway answers; start a stack, or name one with --target gateway-0=HOST:PORT")
        return 1
    titles = ("asked for", "shadow", *_OUTCOMES, "agreement", "valid", "TTFT ms", "TPOT ms", "cost")
    shown = table(*titles)
    for row in rows(readings):
        shown.add_row(*row)
    console.print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
