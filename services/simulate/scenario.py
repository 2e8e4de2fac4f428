"""What is asked of a simulation: a load on a fleet, what happens meanwhile, and how many engines it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from gateway.config import GatewayConfig
from gateway.tiers import Tiers
from services.simulate.arrivals import ArrivingRequest, Burst, GeneratedLoad
from services.simulate.fleet import EngineNode, FleetPlan, VirtualFleet
from services.simulate.outcome import Objective, RunFigures, run_figures
from services.simulate.step_model import EngineSetup

# Engines that a load which comes at one moment is estimated to take.
_MOST_AT_ONCE = 8
# What is asked of the autoscaling rule this often, as a cluster's controller does.
SCALE_INTERVAL_S = 15.0


class ZoneLoss(msgspec.Struct, frozen=True):
    """All engines of one zone die at `at_s`; after `back_s` they are started again, and load."""

    at_s: float
    back_s: float = math.inf


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """Engines come and go by the shipped rule, from `least` to `most`."""

    least: int = 1
    most: int = 1000


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but the number of engines and the seed."""

    # A trace, or what is drawn by a seed.
    load: tuple[ArrivingRequest, ...] | GeneratedLoad
    setup: EngineSetup
    config: GatewayConfig
    tiers: Tiers
    objectives: Mapping[str, Objective]
    fleet: FleetPlan = FleetPlan(num_engines=1)
    burst: Burst | None = None
    zone_loss: ZoneLoss | None = None
    scaling: Scaling | None = None
    skips: bool = True

    def arrivals(self, seed: int) -> Sequence[ArrivingRequest]:
        """The requests of a run."""
        arrivals = self.load.arrivals(seed) if isinstance(self.load, GeneratedLoad) else self.load
        return arrivals if self.burst is None else self.burst.over(arrivals, seed)

    def run(self, num_engines: int, seed: int) -> RunFigures:
        """One run."""
        return run_figures(self.served(num_engines, seed), self.objectives)

    def served(self, num_engines: int, seed: int) -> VirtualFleet:
        """The fleet after a run."""
        arrivals = self.arrivals(seed)
        num_nodes = num_engines if self.scaling is None else self.scaling.most
        plan = msgspec.structs.replace(self.fleet, num_engines=num_nodes)
        fleet = VirtualFleet(
            plan, self.setup.for_seed(seed), self.tiers, self.config, seed=seed, skips=self.skips
        )
        fleet.start(fleet.nodes if self.scaling is None else fleet.nodes[: self.scaling.least])
        if self.zone_loss is not None:
            _lose(fleet, self.zone_loss, self.setup.load_s)
        if self.scaling is not None:
            last_s = arrivals[-1].at_s if arrivals else 0.0
            Autoscaler(fleet, self.scaling, self.setup.load_s).begin(last_s)
        fleet.serve(arrivals)
        return fleet

    def estimate(self, seed: int) -> int:
        """Engines that the load would take if it came evenly, in steps that are well filled."""
        arrivals, setup = self.arrivals(seed), self.setup
        if not arrivals:
            return 1
        num_answers = setup.scheduler.max_num_seqs
        prompts = sum(each.prompt_tokens for each in arrivals)
        outputs = sum(each.output_tokens for each in arrivals)
        length = (prompts + outputs // 2) // len(arrivals)
        token_s = setup.model.answers_s(num_answers, num_answers * length) / num_answers
        work_s = prompts * setup.model.prompt_token_s + outputs * token_s
        return max(1, math.ceil(work_s / max(arrivals[-1].at_s, work_s / _MOST_AT_ONCE, 1e-9)))

    def smallest(
        self, seeds: Sequence[int], share: float, most: int, told: Callable[[int, float], None]
    ) -> tuple[int | None, list[RunFigures]]:
        """The least number of engines with which, for every seed, so large a part of the requests keeps its
        targets, with its runs; None where `most` are too few. By bisection, since more engines serve no less;
        `told` hears the worst part of each number that is tried.
        """
        kept: dict[int, list[RunFigures]] = {}

        def keeps(num_engines: int) -> bool:
            runs: list[RunFigures] = []
            for seed in seeds:
                runs.append(self.run(num_engines, seed))
                if runs[-1].total.goodput < share:
                    break
            worst = min(run.total.goodput for run in runs)
            told(num_engines, worst)
            if worst >= share:
                kept[num_engines] = runs
            return worst >= share

        low, high = 0, min(self.estimate(seeds[0]), most)
        while not keeps(high):
            if high >= most:
                return None, []
            low, high = high, min(2 * high, most)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if keeps(middle) else (middle, high)
        return high, kept[high]


def _lose(fleet: VirtualFleet, loss: ZoneLoss, load_s: float) -> None:
    lost: list[EngineNode] = []

    def die() -> None:
        lost.extend(each for each in fleet.nodes if each.zone == 0 and each.is_up)
        fleet.lose_zone(0)

    def load() -> None:
        for node in lost:
            node.hold()

    fleet.clock.call_at(loss.at_s, die)
    if loss.back_s < math.inf:
        fleet.clock.call_at(loss.at_s + loss.back_s, load)
        fleet.clock.call_at(loss.at_s + loss.back_s + load_s, lambda: fleet.start(lost))


class Autoscaler:
    """Starts and drains engines as the gateways' demand says, every SCALE_INTERVAL_S."""

    def __init__(self, fleet: VirtualFleet, scaling: Scaling, load_s: float) -> None:
        self._fleet, self._scaling, self._load_s = fleet, scaling, load_s
        self._loading: set[int] = set()
        self._until_s = 0.0
        # (moment, engines wanted), for whoever looks.
        self.wanted: list[tuple[float, int]] = []

    def begin(self, until_s: float) -> None:
        """From now on until this moment, and until everything has ended."""
        self._until_s = until_s
        self._look()

    def _look(self) -> None:
        fleet, now = self._fleet, self._fleet.clock.now
        need = math.fsum(sum(each.fleet.wanted_engines().values()) for each in fleet.gateways)
        wanted = min(max(math.ceil(need), self._scaling.least), self._scaling.most)
        self.wanted.append((now, wanted))
        active = [
            each for each in fleet.nodes if each.index in self._loading or (each.is_up and not each.draining)
        ]
        free = [each for each in fleet.nodes if not each.is_up and each.index not in self._loading]
        for node in free[: max(0, wanted - len(active))]:
            node.hold()
            self._loading.add(node.index)
            fleet.clock.call_at(now + self._load_s, partial(self._ready, node))
        for node in reversed(active[wanted:]):
            if node.index in self._loading:
                self._loading.discard(node.index)
                node.release()
            else:
                node.drain()
        if now < self._until_s or fleet.num_open:
            fleet.clock.call_at(now + SCALE_INTERVAL_S, self._look)

    def _ready(self, node: EngineNode) -> None:
        if node.index in self._loading:
            self._loading.discard(node.index)
            self._fleet.start([node])
