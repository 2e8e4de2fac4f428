"""`millrace simulate`: how many engines a load needs, and what bursts, losses and the autoscaler do to it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from runtime.errors import ConfigError, described
from services.cli.options import flattened

# The command line is loaded by every command; scheduler, router and arrays by this one alone.
if TYPE_CHECKING:
    from gateway.config import GatewayConfig
    from services.simulate.arrivals import ArrivingRequest, Burst, GeneratedLoad
    from services.simulate.outcome import Objective
    from services.simulate.report import SimulatedAnswer
    from services.simulate.scenario import Scenario, ZoneLoss
    from services.simulate.step_model import EngineSetup

_MOST_ENGINES = 4096


@dataclass(frozen=True, kw_only=True)
class SimulatedLoad:
    """What comes: a trace, or requests that are drawn."""

    trace: Annotated[
        Path | None,
        typer.Option(help="Requests in Mooncake's form (JSON lines) or Azure's (CSV); else they are drawn."),
    ] = None
    pattern: Annotated[
        Literal["poisson", "bursts", "diurnal"], typer.Option(help="How drawn requests come.")
    ] = "poisson"
    rate: Annotated[float, typer.Option(help="Drawn requests per second, on average.")] = 1.0
    duration: Annotated[float, typer.Option(help="Seconds for which they come.")] = 600.0
    input_tokens: Annotated[str, typer.Option(help="512, uniform:64:512 or lognormal:256:0.5.")] = (
        "lognormal:512:0.8"
    )
    output_tokens: Annotated[str, typer.Option(help="Same forms as --input-tokens.")] = "lognormal:128:0.6"
    tenants: Annotated[int, typer.Option(min=1, help="Tenants that they come from.")] = 1
    tier: Annotated[list[str] | None, typer.Option(help="Share of a tier, as interactive=0.2; repeat.")] = (
        None
    )

    def load(self, tiers: Mapping[str, object]) -> tuple[ArrivingRequest, ...] | GeneratedLoad:
        """Raises ConfigError that names the option, or the trace's line."""
        from services.bench.workload import Lengths
        from services.simulate.arrivals import GeneratedLoad, read_trace

        if self.trace is not None:
            return tuple(read_trace(self.trace, tiers))
        for name, value in (("--rate", self.rate), ("--duration", self.duration)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} {value}: expected a finite number above 0")
        shares = shares_of(self.tier or [])
        for name in shares:
            _check_tier("--tier", name, tiers)
        return GeneratedLoad(
            pattern=self.pattern,
            rate=self.rate,
            duration_s=self.duration,
            input_tokens=Lengths.parse(self.input_tokens),
            output_tokens=Lengths.parse(self.output_tokens),
            num_tenants=self.tenants,
            tiers=shares,
        )

    def told(self) -> str:
        """For people."""
        if self.trace is not None:
            return str(self.trace)
        return f"{self.pattern}, {self.rate:g} requests/s for {self.duration:g} s"


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """What it comes to, and what happens meanwhile."""

    engines: Annotated[
        int | None,
        typer.Option(min=1, max=_MOST_ENGINES, help="Engines; else the least that keep the targets."),
    ] = None
    most_engines: Annotated[
        int,
        typer.Option(min=1, max=_MOST_ENGINES, help="Most that are tried, or that --autoscale starts."),
    ] = 256
    gateways: Annotated[int, typer.Option(min=1, max=1024, help="Gateways.")] = 1
    subset: Annotated[int, typer.Option(min=0, help="Engines that each is attached to; 0 is all.")] = 0
    zones: Annotated[int, typer.Option(min=1, help="Zones over which engines are spread.")] = 1
    lose_zone: Annotated[
        str, typer.Option(help="One zone dies: AT, or AT:BACK seconds; it comes back after a load time.")
    ] = ""
    burst: Annotated[str, typer.Option(help="AT:SECONDS:FACTOR, so many times the requests.")] = ""
    autoscale: Annotated[
        bool, typer.Option("--autoscale", help="Engines come and go as `millrace_engines_wanted` says.")
    ] = False
    steps: Annotated[
        Path | None, typer.Option(help="What steps take, as --measure wrote it; else a GPU is assumed.")
    ] = None
    load_seconds: Annotated[
        float | None, typer.Option(min=0, help="Time to start an engine; as measured when left out.")
    ] = None
    step_by_step: Annotated[
        bool, typer.Option("--step-by-step", help="Skip over no step: slower, with the same figures.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """What is asked, and how it is told."""

    slo: Annotated[
        list[str] | None,
        typer.Option(help="Targets in ms, as ttft=500,tpot=60 or TIER:ttft=300; else the tiers' own."),
    ] = None
    goodput: Annotated[float, typer.Option(help="Part of the requests that must keep their targets.")] = 0.95
    seeds: Annotated[int, typer.Option(min=1, max=64, help="Runs; more than one give intervals.")] = 3
    config: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Configuration file (TOML).")
    ] = None
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None
    measure: Annotated[
        Path | None,
        typer.Option(help="Simulate nothing: load the model of --config, and write what its steps take."),
    ] = None
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Simulate nothing: send a load to the running stack of that engine, or of MILLRACE_URL, and "
            "add to --steps what the stack costs beside it.",
        ),
    ] = False


@flattened
def simulate(load: SimulatedLoad, fleet: FleetOptions, answer: AnswerOptions) -> None:
    """Say how many engines a load needs, by the shipped scheduler, router and autoscaler in virtual time."""
    console = Console(highlight=False)
    # That engines die is what is simulated.
    logging.getLogger("gateway").setLevel(logging.ERROR)
    try:
        if answer.measure is not None:
            raise typer.Exit(_measure(answer.measure, answer.config))
        if answer.calibrate:
            _calibrate(fleet.steps, answer.config, console)
            raise typer.Exit(0)
        if answer.json_file is not None:
            # Now, and not after minutes.
            answer.json_file.touch()
        scenario = _scenario(load, fleet, answer)
        found = _answered(scenario, load, fleet, answer, console)
        from services.simulate import report

        report.show(found, console)
        if answer.json_file is not None:
            answer.json_file.write_bytes(report.as_json(found))
    except ConfigError as error:
        Console(stderr=True).print(f"millrace: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    except OSError as error:
        Console(stderr=True).print(f"millrace: {described(error)}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    if not found.is_kept:
        raise typer.Exit(1)


def _measure(path: Path, config: Path | None) -> int:
    from services.cli import owners

    settings = {} if config is not None else owners.model_settings("", None, None)
    arguments = ["--json", str(path), *(["--config", str(config)] if config else [])]
    return owners.run_module("engine.core.step_record", arguments, settings=settings)


def _calibrate(steps: Path | None, config: Path | None, console: Console) -> None:
    import asyncio

    from gateway.settings import load_settings
    from gateway.tiers import Tiers
    from services.bench.client import BenchTarget
    from services.cli.owners import configured_tables
    from services.cli.target import find_target
    from services.simulate import calibration
    from services.simulate.step_model import read_record

    if steps is None:
        raise ConfigError("--calibrate: give --steps FILE, which --measure wrote of the stack's engine")
    setup, settings = read_record(steps), load_settings(configured_tables(config))
    stack = find_target()
    target = BenchTarget.parse(stack.url, stack.api_key)
    costs = asyncio.run(calibration.calibrated(target, setup, settings.gateway, Tiers(settings)))
    calibration.write(steps, costs)
    slowdown, front_s = costs.for_seed(0)
    console.print(
        f"{steps}: steps take {slowdown:.2f} times as long in this stack, and {1000 * front_s:.1f} ms pass "
        "outside the engine before a first token is there"
    )


def _scenario(load: SimulatedLoad, fleet: FleetOptions, answer: AnswerOptions) -> Scenario:
    from gateway.settings import load_settings
    from gateway.tiers import Tiers
    from services.cli.owners import configured_tables
    from services.simulate.fleet import FleetPlan
    from services.simulate.scenario import Scaling, Scenario

    if not 0 < answer.goodput <= 1:
        raise ConfigError(f"--goodput {answer.goodput}: expected a part, above 0 and at most 1")
    tables = configured_tables(answer.config)
    settings = load_settings(tables)
    setup = _setup(fleet, tables)
    if fleet.zones > (fleet.engines or _MOST_ENGINES):
        raise ConfigError(f"--zones {fleet.zones}: there are {fleet.engines} engines; expected no more zones")
    if fleet.autoscale and fleet.engines is not None:
        raise ConfigError("--engines: with --autoscale the rule decides; give --most-engines in its place")
    return Scenario(
        load=load.load(settings.tiers),
        setup=setup,
        config=_gateway(settings.gateway, setup, tables),
        tiers=Tiers(settings),
        objectives=_objectives(answer.slo or [], settings.tiers),
        fleet=FleetPlan(
            num_engines=1, num_zones=fleet.zones, num_gateways=fleet.gateways, subset=fleet.subset
        ),
        burst=_burst(fleet.burst),
        zone_loss=_zone_loss(fleet.lose_zone),
        scaling=Scaling(most=fleet.most_engines) if fleet.autoscale else None,
        skips=not fleet.step_by_step,
    )


def _gateway(config: GatewayConfig, setup: EngineSetup, tables: Mapping[str, Any]) -> GatewayConfig:
    """The rule looks as far ahead as engines take to start here, unless it is told otherwise."""
    import msgspec

    if "load_s" in tables.get("gateway", {}).get("autoscaling", {}) or not setup.load_s:
        return config
    autoscaling = msgspec.structs.replace(config.autoscaling, load_s=setup.load_s)
    return msgspec.structs.replace(config, autoscaling=autoscaling)


def _setup(fleet: FleetOptions, tables: Mapping[str, object]) -> EngineSetup:
    import msgspec

    from engine.config import load
    from services.simulate.step_model import assumed, read_record

    if fleet.steps is not None:
        setup = read_record(fleet.steps)
    else:
        config = load(tables)
        setup = assumed(config.scheduler, config.cache)
    if fleet.load_seconds is not None:
        setup = msgspec.structs.replace(setup, load_s=fleet.load_seconds)
    return setup


def _answered(
    scenario: Scenario, load: SimulatedLoad, fleet: FleetOptions, answer: AnswerOptions, console: Console
) -> SimulatedAnswer:
    from services.simulate.report import SimulatedAnswer

    seeds, tried = list(range(answer.seeds)), list[tuple[int, float]]()
    num_engines, is_searched = fleet.engines, fleet.engines is None and not fleet.autoscale

    def told(count: int, worst: float) -> None:
        tried.append((count, worst))
        console.print(f"[dim]{count} engines: {100 * worst:.1f} % keep their targets[/]")

    simulated_s, began_s = 0.0, time.process_time()
    if is_searched:
        num_engines, runs = scenario.smallest(seeds, answer.goodput, fleet.most_engines, told)
        began_s = time.process_time()
        simulated_s = scenario.run(num_engines, seeds[0]).duration_s if num_engines is not None else 0.0
    else:
        runs = [scenario.run(num_engines or 1, seed) for seed in seeds]
        simulated_s = math.fsum(run.duration_s for run in runs)
    spent_s = max(time.process_time() - began_s, 1e-9)
    return SimulatedAnswer(
        load=load.told(),
        engine=scenario.setup.name,
        engines=num_engines if not fleet.autoscale else fleet.most_engines,
        is_searched=is_searched,
        goodput_asked=answer.goodput,
        tried=tried,
        runs=runs,
        speed_up=simulated_s / spent_s,
    )


# --- options that are more than a number ------------------------------------------------------------------


def shares_of(texts: list[str]) -> dict[str, float]:
    """Shares by tier. Raises ConfigError."""
    from services.bench.options import parse_tiers

    return parse_tiers(texts)


def _check_tier(option: str, name: str, tiers: Mapping[str, object]) -> None:
    if name not in tiers:
        raise ConfigError(f"{option} {name}: there is no [tiers.{name}]; known: {', '.join(sorted(tiers))}")


def _objectives(texts: list[str], tiers: Mapping[str, object]) -> dict[str, Objective]:
    from gateway.config import TierConfig
    from services.simulate.outcome import Objective

    found = {}
    for name, tier in tiers.items():
        assert isinstance(tier, TierConfig), "the table of tiers"
        found[name] = Objective(_seconds(tier.ttft_target_ms), _seconds(tier.tpot_target_ms))
    for text in texts:
        scope, _, pairs = text.rpartition(":")
        if scope:
            _check_tier("--slo", scope, tiers)
        targets = {}
        for pair in pairs.split(","):
            name, _, number = pair.partition("=")
            targets[name] = _number(number)
            if name not in ("ttft", "tpot") or not 0 < targets[name] < math.inf:
                raise ConfigError(
                    f"--slo {text!r}: expected ttft=<ms>, tpot=<ms> or both with a comma, for one tier as "
                    "TIER:ttft=<ms>"
                )
        for name in [scope] if scope else tiers:
            found[name] = Objective(_seconds(targets.get("ttft")), _seconds(targets.get("tpot")))
    return found


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _burst(text: str) -> Burst | None:
    from services.simulate.arrivals import Burst

    if not text:
        return None
    numbers = [_number(each) for each in text.split(":")]
    if len(numbers) != 3 or not all(0 <= each < math.inf for each in numbers) or numbers[2] < 1:
        raise ConfigError(
            f"--burst {text!r}: expected AT:SECONDS:FACTOR, times of 0 or more and a factor of 1 or more"
        )
    return Burst(*numbers)


def _zone_loss(text: str) -> ZoneLoss | None:
    from services.simulate.scenario import ZoneLoss

    if not text:
        return None
    numbers = [_number(each) for each in text.split(":")]
    if len(numbers) > 2 or not all(0 <= each < math.inf for each in numbers):
        raise ConfigError(f"--lose-zone {text!r}: expected AT or AT:BACK, seconds of 0 or more")
    return ZoneLoss(*numbers)
