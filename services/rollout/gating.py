"""The suite of a rollout: the gate judges the candidate beside the traffic."""

from __future__ import annotations

import logging
from pathlib import Path

from runtime.errors import ConfigError
from services.gate.cases import GateVerdict, LayerName
from services.gate.client import Endpoint
from services.gate.run import GateRun
from services.gate.suite import read_suite
from services.rollout.store import StoredRollout

_log = logging.getLogger(__name__)


async def run_suite(rollout: StoredRollout, url: str, api_key: str, folder: Path) -> tuple[GateVerdict, str]:
    """The gate's verdict on both models of the server at `url`, and what it rests on; answers are kept in
    `folder`. A suite that cannot be run, or whose server is lost, is no verdict: the rollout holds, and tells
    why.
    """
    try:
        return await _compare(rollout, url, api_key, folder)
    except Exception as error:
        if not isinstance(error, ConfigError | OSError):
            _log.exception("the suite has failed")
        return GateVerdict.NOT_ENOUGH, str(error) or type(error).__name__


async def _compare(rollout: StoredRollout, url: str, api_key: str, folder: Path) -> tuple[GateVerdict, str]:
    gate = rollout.plan.gate
    assert gate is not None, "it is run for a plan with a suite"
    baseline = max(rollout.sides.baseline, key=rollout.configured.__getitem__)
    sides = [Endpoint(url=url, model=model, api_key=api_key) for model in (baseline, rollout.sides.candidate)]
    path = Path(gate.suite) if gate.suite else None
    run = GateRun(
        read_suite(path),
        suite_folder=path.parent if path else Path(),
        folder=folder,
        concurrency=gate.concurrency,
    )
    found = await run.compare(sides[0], sides[1], _unheard)
    layers = "; ".join(f"{each.layer} {each.verdict} ({each.difference:+.3f})" for each in found.layers)
    return found.verdict, f"{found.verdict}: {layers}"


def _unheard(layer: LayerName, done: int, total: int, verdict: GateVerdict) -> None:
    """Nobody watches its progress."""
