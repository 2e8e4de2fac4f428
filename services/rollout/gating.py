"""The suite of a rollout: the gate judges the candidate beside the traffic."""

from __future__ import annotations

import logging
from pathlib import Path

from runtime.errors import ConfigError
from services.gate.cases import GateVerdict, LayerName
from services.rollout.store import StoredRollout

_log = logging.getLogger(__name__)


async def run_suite(rollout: StoredRollout, url: str) -> tuple[GateVerdict, str]:
    """The gate's verdict on both models of the server at `url`, and what it rests on. A suite that cannot be
    run, or whose server is lost, is no verdict: the rollout holds, and tells why.
    """
    try:
        return await _compare(rollout, url)
    except ImportError as error:
        told = f"{error.name} is not installed here; watch the rollout where `millrace gate` runs"
        return GateVerdict.NOT_ENOUGH, told
    except Exception as error:
        if not isinstance(error, ConfigError | OSError):
            _log.exception("the suite has failed")
        return GateVerdict.NOT_ENOUGH, str(error) or type(error).__name__


async def _compare(rollout: StoredRollout, url: str) -> tuple[GateVerdict, str]:
    # The gateway's image, in which rollouts are watched without a suite, has none of what these need.
    from services.cli.target import find_target
    from services.gate.client import Endpoint
    from services.gate.run import GateRun
    from services.gate.suite import read_suite
    from services.supervisor.config import state_directory

    gate = rollout.plan.gate
    assert gate is not None, "it is run for a plan with a suite"
    target = find_target(url)
    baseline = max(rollout.sides.baseline, key=rollout.configured.__getitem__)
    sides = [
        Endpoint(url=target.url, model=model, api_key=target.api_key)
        for model in (baseline, rollout.sides.candidate)
    ]
    path = Path(gate.suite) if gate.suite else None
    run = GateRun(
        read_suite(path),
        suite_folder=path.parent if path else Path(),
        folder=state_directory() / "gate",
        concurrency=gate.concurrency,
    )
    found = await run.compare(sides[0], sides[1], _unheard)
    layers = "; ".join(f"{each.layer} {each.verdict} ({each.difference:+.3f})" for each in found.layers)
    return found.verdict, f"{found.verdict}: {layers}"


def _unheard(layer: LayerName, done: int, total: int, verdict: GateVerdict) -> None:
    """Nobody watches its progress."""
