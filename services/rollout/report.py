"""Rollouts and their decisions in the terminal, and as JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from services.rollout.decision import RolloutAction, RolloutDecision
from services.rollout.evidence import Evidence, judge
from services.rollout.figures import CANDIDATE, ERRORS
from services.rollout.store import RolloutState, StoredDecision, StoredRollout


def tell(rollout: StoredRollout, decision: RolloutDecision) -> None:
    """One line for a decision that was made."""
    moment = datetime.now(UTC).strftime("%H:%M:%S")
    share = f"{rollout.sides.candidate} has {rollout.share:.4g} of {rollout.sides.alias}"
    print(f"{moment} {decision.action}: {decision.reason}; {share}", flush=True)
    if decision.action in (RolloutAction.ADVANCE, RolloutAction.TAKE_BACK):
        for each in decision.evidence:
            print(f"         {_line(each)}", flush=True)


def show_status(rollouts: Sequence[StoredRollout], *, as_json: bool) -> None:
    """Where each is."""
    if as_json:
        _print_json([_state(each) for each in rollouts])
        return
    columns = ("alias", "candidate", "state", "step", "share", "requests", "watched by", "seen", "trace")
    table = Table(*columns, box=None)
    for each in rollouts:
        steps = len(each.plan.steps)
        num_requests = each.progress.tally.counts.get(f"{CANDIDATE}.{ERRORS}.all", 0.0)
        is_running = each.state is RolloutState.RUNNING
        silent_s = time.time() - each.beat_unix_ms / 1000
        table.add_row(
            each.sides.alias,
            each.sides.candidate,
            each.state,
            f"{min(each.step + 1, steps)} of {steps}",
            f"{each.share:.4g}",
            f"{num_requests:.0f}",
            each.watcher if is_running else "-",
            f"{silent_s:.0f} s ago" if is_running else "-",
            each.progress.trace_id or "-",
        )
    console = _console()
    console.print(table if rollouts else "there has been no rollout")
    for each in rollouts:
        if each.state is RolloutState.RUNNING:
            for evidence in judge(each.progress.tally.counts, each.plan):
                console.print(f"  {each.sides.alias}: {_line(evidence)}", markup=False)


def show_history(decisions: Sequence[StoredDecision], *, as_json: bool) -> None:
    """What was decided."""
    if as_json:
        _print_json(msgspec.to_builtins(decisions))
        return
    table = Table("when (UTC)", "alias", "candidate", "share", "decision", "reason", "who", box=None)
    for each in decisions:
        moment = datetime.fromtimestamp(each.decided_unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
        share = f"{each.share_before:.4g} to {each.share_after:.4g}"
        table.add_row(moment, each.alias, each.candidate, share, each.action, each.reason, each.who)
    _console().print(table if decisions else "nothing has been decided")


def _state(rollout: StoredRollout) -> dict[str, Any]:
    return {
        "alias": rollout.sides.alias,
        "candidate": rollout.sides.candidate,
        "baseline": list(rollout.sides.baseline),
        "state": rollout.state.value,
        "step": rollout.step,
        "num_steps": len(rollout.plan.steps),
        "share": rollout.share,
        "began_unix_ms": rollout.began_unix_ms,
        "step_unix_ms": rollout.step_unix_ms,
        "watcher": rollout.watcher,
        "beat_unix_ms": rollout.beat_unix_ms,
        "gate": rollout.progress.gate_note,
        "trace": rollout.progress.trace_id,
        "evidence": msgspec.to_builtins(judge(rollout.progress.tally.counts, rollout.plan)),
    }


def _line(each: Evidence) -> str:
    return (
        f"{each.figure}: {each.verdict}; candidate {each.candidate:.2%} of {each.num_candidate}, baseline "
        f"{each.baseline:.2%} of {each.num_baseline}, worse by {each.lower:+.2%} to {each.upper:+.2%} (limit "
        f"{each.delta:.2%})"
    )


def _print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _console() -> Console:
    # Piped into a file, a table is as wide as it needs to be.
    return Console(width=None if sys.stdout.isatty() else 250, highlight=False)
