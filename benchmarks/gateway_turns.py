"""What a change costs on the whole path: several checkouts under the loads of gateway_overhead, in turns.

`python -m benchmarks.gateway_turns NAME=CHECKOUT[,VARIABLE=VALUE] ... [--rounds 8] [--quick] [--output FILE]`

Each checkout is a working tree with its own environment in `.venv` (`git worktree add`, `make install`). The
first is what the others are held against. One client, that of the checkout in which this runs, asks all of
them: every request is sampled and traced, and one gateway process answers. An environment variable for one of
them is written behind a comma. A round runs every checkout once,
and the next one in the opposite order, so that a machine whose speed drifts treats all alike. Printed are the
medians over the rounds, and the median of the ratios to the first within a round, with the smallest and the
largest.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks.gateway_overhead import TARGETS, loads, run_millrace
from benchmarks.gateways import peers
from benchmarks.gateways.load import Figures, Load, run_loads
from services.bench.report import machine

# Of one round: the back end alone, and each checkout by load.
Round = dict[str, dict[str, Figures]]
_FLOOR = "direct"


class Row(msgspec.Struct, frozen=True):
    """One load of one checkout over all rounds."""

    checkout: str
    load: str
    figure: str
    median: float
    # To the first checkout, within a round.
    ratio: float
    ratios: tuple[float, ...]
    # CPU milliseconds a request of all processes, median.
    cpu_ms: float
    num_failed: int
    met: bool


class Checkout(msgspec.Struct, frozen=True):
    """A working tree, and the environment variables that its stack gets."""

    folder: Path
    environment: dict[str, str]


def checkout_of(text: str) -> Checkout:
    """Of `FOLDER[,VARIABLE=VALUE]`."""
    folder, _, variable = text.partition(",")
    name, _, value = variable.partition("=")
    return Checkout(Path(folder).resolve(), {name: value} if name else {})


def run_round(checkouts: Mapping[str, Checkout], names: Sequence[str], wanted: dict[str, Load]) -> Round:
    """Every checkout once, and what the client and the back end need by themselves."""
    with peers.backend(0.0) as port:
        found: Round = {
            _FLOOR: asyncio.run(run_loads(peers.direct(port), {"alone": wanted["alone"]})),
        }
    for name in names:
        checkout = checkouts[name]
        with patched(checkout.environment):
            found[name] = run_millrace(wanted, checkout.folder)
    return found


@contextmanager
def patched(variables: Mapping[str, str]) -> Iterator[None]:
    """The process's environment with these variables, for those that it starts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def rows(rounds: Sequence[Round], names: Sequence[str]) -> list[Row]:
    """The table."""
    made = []
    for load, (figure, target, value) in TARGETS.items():
        less_is_better = load == "alone"
        by_name = {
            name: [value(each[name][load], each[_FLOOR]["alone"]) for each in rounds] for name in names
        }
        first = by_name[names[0]]
        for name in names:
            median = statistics.median(by_name[name])
            ratios = tuple(mine / other for mine, other in zip(by_name[name], first, strict=True))
            made.append(
                Row(
                    name,
                    load,
                    figure,
                    median,
                    statistics.median(ratios),
                    ratios,
                    statistics.median(sum(each[name][load].cpu_ms.values()) for each in rounds),
                    sum(each[name][load].num_failed for each in rounds),
                    median <= target if less_is_better else median >= target,
                )
            )
    return made


def main() -> None:
    """Prints the table after each round, and writes it with every round's figures when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "checkouts", nargs="+", help="NAME=FOLDER[,VARIABLE=VALUE]; the first is the baseline"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()
    pairs = [each.partition("=") for each in arguments.checkouts]
    checkouts = {name: checkout_of(text) for name, _, text in pairs}
    for name, checkout in checkouts.items():
        if not (checkout.folder / ".venv" / "bin" / "python").exists():
            parser.error(f"{name}: {checkout.folder} has no .venv; run `make install` there")
    names = list(checkouts)
    wanted = loads(10 if arguments.quick else 1)
    rounds: list[Round] = []
    for number in range(arguments.rounds):
        order = names if number % 2 == 0 else names[::-1]
        rounds.append(run_round(checkouts, order, wanted))
        table = rows(rounds, names)
        print(f"after {len(rounds)} rounds")
        for row in table:
            print(
                f"  {row.load:7} {row.checkout:12} {row.figure:14} {row.median:10.4g}   "
                f"x {row.ratio:.3f} ({min(row.ratios):.3f}-{max(row.ratios):.3f})   "
                f"CPU {row.cpu_ms:6.2f} ms a request   {row.num_failed} failed   "
                f"{'met' if row.met else 'MISSED'}",
                flush=True,
            )
        if arguments.output is not None:
            report = {"machine": machine(), "loads": wanted, "rows": table, "rounds": rounds}
            arguments.output.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


if __name__ == "__main__":
    main()
