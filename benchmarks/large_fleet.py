"""What many engines cost each gateway, and what is lost where a gateway looks at a part of them.

    python -m benchmarks.large_fleet [--engines 100] [--gateways 4] [--seconds 40] [--rate 3] [--json OUT]

First the cost, with the shipped `Fleet` and nothing behind it: time of one choice, memory of what is known
of caches, and reports that engines send which have nothing to say. Then the choices, in virtual time and with
the shipped scheduler: sessions of several turns, whose prompts begin with what was said before, on engines of
an assumed GPU. Each row changes one thing against the first: how many engines are compared for a request, of
one in how many blocks gateways hear, to how many engines a gateway is attached. "busy" is the engines' time
for the same requests: a prefix that is not met again is computed again. Times of the choice are wall clock,
so ratios count; all else is virtual.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.engine.report import publish
from contract.engines import BlocksStored, EngineLoad
from contract.sampling import SamplingParams
from engine.config import CacheConfig, SchedulerConfig
from gateway.config import GatewayConfig, RoutingConfig
from gateway.engines.fleet import Fleet
from gateway.engines.prefix import PrefixIndex
from gateway.engines.types import Submission
from gateway.settings import load_settings
from gateway.tiers import Tiers
from services.simulate.arrivals import HASH_TOKENS, ArrivingRequest
from services.simulate.fleet import EngineNode, FleetPlan, VirtualAttachment, drive
from services.simulate.scenario import Scenario
from services.simulate.step_model import assumed

ALL = 1_000_000
# Seconds between an idle engine's reports: `engine.service.dispatcher`.
_QUIET_REPORT_S = 0.5
# Of an engine with an 8B model's keys and values on one GPU.
_HELD_BLOCKS = 16_384
_TURNS, _THINK_S = 6, 8.0
_SETUP = assumed(SchedulerConfig(), CacheConfig())


def sessions(rate: float, seconds: float, seed: int) -> tuple[ArrivingRequest, ...]:
    """Requests of sessions: a common beginning, then two more parts of HASH_TOKENS with every turn."""
    chance = random.Random(seed)
    arrivals: list[ArrivingRequest] = []
    number, begins_s = 0, -_TURNS * _THINK_S
    while begins_s < seconds:
        begins_s += chance.expovariate(rate / _TURNS)
        number += 1
        at_s = begins_s
        for turn in range(_TURNS):
            own = tuple(number * 100 + part for part in range(1 + 2 * turn))
            ids = (number % 8, *own)
            if 0 <= at_s < seconds:
                arrivals.append(ArrivingRequest(at_s, len(ids) * HASH_TOKENS + 64, 120, "tenant", "", ids))
            at_s += chance.expovariate(1 / _THINK_S)
    return tuple(sorted(arrivals))


def choices(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each way to look at fewer engines."""
    settings = load_settings({})
    ways: list[tuple[str, dict[str, Any], int]] = [
        ("all compared", {"max_candidates": ALL}, 0),
        ("64 compared", {"max_candidates": 64}, 0),
        ("16 compared", {"max_candidates": 16}, 0),
        ("all compared, one block in 8", {"max_candidates": ALL, "prefix_sample": 8}, 0),
        ("all compared, one block in 32", {"max_candidates": ALL, "prefix_sample": 32}, 0),
        ("64 compared, one block in 8", {"max_candidates": 64, "prefix_sample": 8}, 0),
        ("attached to half", {"max_candidates": ALL}, options.engines // 2),
        ("attached to a quarter", {"max_candidates": ALL}, options.engines // 4),
        ("no prefixes", {"policy": "least_pending"}, 0),
    ]
    load = sessions(options.rate * options.engines, options.seconds, 1)
    for name, routing, subset in ways:
        config: GatewayConfig = msgspec.structs.replace(settings.gateway, routing=RoutingConfig(**routing))
        plan = FleetPlan(num_engines=options.engines, num_gateways=options.gateways, subset=subset)
        scenario = Scenario(
            load=load, setup=_SETUP, config=config, tiers=Tiers(settings), objectives={}, fleet=plan
        )
        run = scenario.run(options.engines, 1)
        yield {
            "way": name,
            "requests": run.total.num_requests,
            "ttft p50 ms": 1000 * run.total.ttft_p50_s,
            "ttft p99 ms": 1000 * run.total.ttft_p99_s,
            "tpot p99 ms": 1000 * run.total.tpot_p99_s,
            "busy": run.busy_s / run.engine_s,
        }


def attached(num_engines: int, routing: RoutingConfig) -> Fleet:
    """A gateway's fleet of so many engines, each with some load."""
    fleet = Fleet(gateway="one", routing=routing, attachment=VirtualAttachment)
    nodes = [EngineNode(index, 0, _SETUP, None, 1, skips=True) for index in range(num_engines)]  # type: ignore[arg-type]
    drive(fleet.set_targets([node.target for node in nodes]))
    chance = random.Random(1)
    for attachment, node in zip(fleet.attachments, nodes, strict=True):
        assert isinstance(attachment, VirtualAttachment)
        attachment.connect(node)
        attachment.report(
            EngineLoad(
                num_running=chance.randrange(20),
                pending_prefill_tokens=chance.randrange(8000),
                num_free_blocks=8000,
                num_total_blocks=16_000,
            ),
            [BlocksStored(tuple(chance.getrandbits(64) for _ in range(64)))],
        )
    return fleet


def choice_us(num_engines: int, routing: RoutingConfig, affinity: str = "") -> float:
    """Microseconds of one choice, the median of 200."""
    fleet, taken = attached(num_engines, routing), []
    chance = random.Random(2)
    for number in range(200):
        submission = Submission(
            context=None,
            prompt_token_ids=tuple(chance.randrange(32_000) for _ in range(2000)),
            sampling=SamplingParams(),
            model="model",
            checkpoint="model",
            request_id=str(number),
            affinity=affinity and f"{affinity} {number % 20}",
        )
        began = time.perf_counter()
        fleet.pick(submission)
        taken.append(time.perf_counter() - began)
    return 1e6 * statistics.median(taken)


def index_bytes(sample: int) -> float:
    """Bytes of what a gateway knows of one engine's cache."""
    chance = random.Random(3)
    tracemalloc.start()
    index = PrefixIndex(sample)
    for _ in range(_HELD_BLOCKS // 64):
        index.apply([BlocksStored(tuple(chance.getrandbits(64) for _ in range(64)))])
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken


def costs() -> Iterator[dict[str, Any]]:
    """A row for each number of engines."""
    each = {sample: index_bytes(sample) / 1e6 for sample in (1, 8, 32)}
    for num_engines in (10, 100, 1000):
        yield {
            "engines": num_engines,
            "choice us, all compared": choice_us(num_engines, RoutingConfig(max_candidates=ALL)),
            "choice us, 64 compared": choice_us(num_engines, RoutingConfig()),
            "with a prompt cache key": choice_us(num_engines, RoutingConfig(), "key"),
            "reports/s at rest": num_engines / _QUIET_REPORT_S,
            **{f"MB of index, 1 in {sample}": num_engines * mb for sample, mb in each.items()},
        }


def main() -> None:
    """Runs, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second and engine")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = list(costs())
    publish("What many engines cost a gateway", rows, None)
    said = f"{options.engines} engines, {options.gateways} gateways, {options.rate:g} requests/s and engine"
    publish(f"Choices: {said}", rows_of := list(choices(options)), None)
    publish(f"A large fleet: costs of one gateway; choices with {said}", rows + rows_of, options.json)


if __name__ == "__main__":
    main()
