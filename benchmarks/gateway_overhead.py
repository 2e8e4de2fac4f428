"""What the whole path costs when the engine answers instantly: Envoy, gateway, tokenizer, engine and back.

`python -m benchmarks.gateway_overhead [NAME=CHECKOUT[,VARIABLE=VALUE] ...] [--rounds 1] [--quick]
    [--json OUT]`

One gateway process; authentication, limits, ledger and the trace of every request are on. Four loads on
`/v1/chat/completions`, from one client (`services.bench`):

  alone      one request at a time, one token: added latency
  rate       32 at a time, one token: requests per second
  stream     64 streams of 128 tokens at full speed: tokens per second
  paced      256 streams at 20 ms a token: share of tokens that come within 50 ms of when they are due

A chunk is due one engine step after the one before it; chunks that come together with a late one are late as
well. The share by the schedule that a stream's first chunk begins stands beside it: there a stall costs the
chunks that it delays beyond the limit, and time that is lost for good every chunk after it. The baseline of
each round is a back end that costs nothing (`direct`) under the same loads: what it adds is the client's.

Without a name this tree is measured. Names say what a change costs: each is a working tree with its own
environment in `.venv` (`git worktree add`, `make install`), and the first is what the others are held
against. An environment variable for one of them is written behind a comma. A round runs every checkout once,
and the next one in the opposite order, so that a machine whose speed drifts treats all alike. Printed are the
medians over the rounds, and of the ratios to the first within a round, with the smallest and the largest.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.engine.report import options
from benchmarks.gateways import peers
from benchmarks.gateways.load import STEP_MS, Figures, Load, run_loads
from services.bench.report import machine

# Of one round: the back end alone, and each checkout, by load.
Round = dict[str, dict[str, Figures]]
_FLOOR = "direct"
# What an engine's step takes, and the loads on it.
_STEPS = ((0.0, ("alone", "rate", "stream")), (STEP_MS, ("paced",)))
# What is judged of each load, its target, and its value, given the figures of the back end alone as well.
TARGETS: dict[str, tuple[str, float, Callable[[Figures, Figures], float]]] = {
    "alone": ("added p50, ms", 4.0, lambda of, floor: of.latency_p50_ms - floor.latency_p50_ms),
    "rate": ("requests/s", 800.0, lambda of, floor: of.requests_per_s),
    "stream": ("tokens/s", 20_000.0, lambda of, floor: of.tokens_per_s),
    "paced": ("share on time", 0.999, lambda of, floor: of.on_time),
}


class Row(msgspec.Struct, frozen=True):
    """One load of one checkout over all rounds. Of latencies, less is better."""

    checkout: str
    load: str
    figure: str
    median: float
    target: float
    met: bool
    # To the first checkout, within a round.
    ratio: float
    ratios: tuple[float, ...]
    # CPU milliseconds a request of all processes, median.
    cpu_ms: float
    num_failed: int


class Checkout(msgspec.Struct, frozen=True):
    """A working tree, this one where none is named, and the environment variables that its stack gets."""

    folder: Path | None = None
    environment: dict[str, str] = {}

    @classmethod
    def parse(cls, text: str) -> Checkout:
        """Of `FOLDER[,VARIABLE=VALUE]`."""
        folder, _, variable = text.partition(",")
        name, _, value = variable.partition("=")
        return cls(Path(folder).resolve(), {name: value} if name else {})


def loads(*, quick: bool) -> dict[str, Load]:
    """The four loads, or about a tenth of them."""
    return {
        "alone": Load(1, 100 if quick else 1000, 1),
        "rate": Load(32, 1000 if quick else 10_000, 1),
        "stream": Load(64, 128 if quick else 1280, 128),
        "paced": Load(256, 256 if quick else 512, 32 if quick else 128),
    }


def run_round(checkouts: Mapping[str, Checkout], names: Sequence[str], wanted: dict[str, Load]) -> Round:
    """The back end alone, then every checkout once: with an instant engine, and with a paced one."""
    found: Round = {name: {} for name in (_FLOOR, *names)}
    for step_ms, kinds in _STEPS:
        of_step = {kind: wanted[kind] for kind in kinds}
        with peers.backend(step_ms) as peer:
            found[_FLOOR] |= asyncio.run(run_loads(peer, of_step))
        for name in names:
            each = checkouts[name]
            with peers.millrace(step_ms, each.folder, each.environment) as state:
                peer, processes = peers.own(state)
                found[name] |= asyncio.run(run_loads(peer, of_step, processes))
    return found


def rows(rounds: Sequence[Round], names: Sequence[str]) -> list[Row]:
    """The table."""
    made = []
    for load, (figure, target, value) in TARGETS.items():
        by_name = {
            name: [value(each[name][load], each[_FLOOR]["alone"]) for each in rounds] for name in names
        }
        for name in names:
            median = statistics.median(by_name[name])
            pairs = zip(by_name[name], by_name[names[0]], strict=True)
            ratios = tuple(mine / other for mine, other in pairs)
            made.append(
                Row(
                    checkout=name,
                    load=load,
                    figure=figure,
                    median=median,
                    target=target,
                    met=median <= target if load == "alone" else median >= target,
                    ratio=statistics.median(ratios),
                    ratios=ratios,
                    cpu_ms=statistics.median(sum(each[name][load].cpu_ms.values()) for each in rounds),
                    num_failed=sum(each[name][load].num_failed for each in rounds),
                )
            )
    return made


def main() -> None:
    """Prints the table after each round, and writes it with every round's figures when asked to."""
    parser = options(__doc__)
    parser.add_argument(
        "checkouts", nargs="*", help="NAME=FOLDER[,VARIABLE=VALUE]; the first is the baseline"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    arguments = parser.parse_args()
    pairs = [each.partition("=") for each in arguments.checkouts]
    checkouts = {name: Checkout.parse(text) for name, _, text in pairs} or {"millrace": Checkout()}
    for name, checkout in checkouts.items():
        if checkout.folder and not (checkout.folder / ".venv" / "bin" / "python").exists():
            parser.error(f"{name}: {checkout.folder} has no .venv; run `make install` there")
    names = list(checkouts)
    wanted = loads(quick=arguments.quick)
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
                f"target {row.target:g} {'met' if row.met else 'MISSED'}",
                flush=True,
            )
        if arguments.json is not None:
            report = {"machine": machine(), "loads": wanted, "rows": table, "rounds": rounds}
            arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


if __name__ == "__main__":
    main()
