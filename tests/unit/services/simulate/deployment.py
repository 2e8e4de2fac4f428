"""Small fleets for the simulator's tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine.config import CacheConfig, SchedulerConfig
from gateway.settings import load_settings
from gateway.tiers import Tiers
from services.bench.workload import Lengths
from services.simulate.arrivals import ArrivingRequest, GeneratedLoad
from services.simulate.fleet import FleetPlan
from services.simulate.outcome import Objective
from services.simulate.scenario import Scenario
from services.simulate.step_model import EngineSetup, assumed

TABLES: Mapping[str, Any] = {
    "model": {"path": "model"},
    "gateway": {"default_tier": "standard"},
    "tiers": {
        "interactive": {
            "priority": 20,
            "weight": 3.0,
            "ttft_target_ms": 300,
            "tpot_target_ms": 40,
            "admission": "guaranteed",
        },
        "standard": {"priority": 10, "ttft_target_ms": 2000, "admission": "best_effort"},
    },
    "tenants": {"tenant-1": {"weight": 0.7}},
}


def setup(**changes: Any) -> EngineSetup:
    """An engine with these settings of its scheduler."""
    return assumed(msgspec.structs.replace(SchedulerConfig(), **changes), CacheConfig())


def load(rate: float = 4.0, duration_s: float = 20.0, **changes: Any) -> GeneratedLoad:
    """A drawn load of two tiers and three tenants."""
    settings: dict[str, Any] = {
        "rate": rate,
        "duration_s": duration_s,
        "input_tokens": Lengths.parse("lognormal:300:0.8"),
        "output_tokens": Lengths.parse("lognormal:60:0.6"),
        "num_tenants": 3,
        "tiers": {"interactive": 0.3, "standard": 0.7},
    }
    return GeneratedLoad(**{**settings, **changes})


def scenario(
    what: GeneratedLoad | Sequence[ArrivingRequest], engine: EngineSetup | None = None, **changes: Any
) -> Scenario:
    """That load on the deployment of TABLES; the autoscaler's settings are `autoscaling`."""
    gateway = {**TABLES["gateway"], "autoscaling": changes.pop("autoscaling", {})}
    settings = load_settings({**TABLES, "gateway": gateway})
    standard = Objective(ttft_s=2.0, tpot_s=0.04)
    given: dict[str, Any] = {
        "load": what if isinstance(what, GeneratedLoad) else tuple(what),
        "setup": engine or setup(),
        "config": settings.gateway,
        "tiers": Tiers(settings),
        "objectives": {"interactive": Objective(ttft_s=0.3, tpot_s=0.04), "standard": standard},
        "fleet": FleetPlan(num_engines=1),
    }
    return Scenario(**{**given, **changes})
