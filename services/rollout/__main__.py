"""Move an alias to a candidate by 1, 10, 50, 100 %, or take it back: `millrace rollout run ALIAS MODEL`."""

from __future__ import annotations

import argparse
import asyncio
import getpass
import math
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from sqlalchemy.exc import SQLAlchemyError

from gateway.settings import Settings, load_settings
from runtime.config import read_tables
from runtime.errors import ConfigError
from services.gate.suite import check_cases, read_suite
from services.rollout import report
from services.rollout.decision import RolloutAction, RolloutDecision, Why
from services.rollout.evidence import judge
from services.rollout.figures import Sides
from services.rollout.gating import run_suite
from services.rollout.plan import RolloutPlan, read_plan
from services.rollout.store import RolloutMoved, RolloutState, RolloutStore, StoredRollout, weights_of
from services.rollout.traces import RolloutTraces
from services.rollout.watch import RolloutWatch, WatchedElsewhere, scraper

# A watcher without a sign of life for so long is gone.
_LEASE_S = 5.0
# Where the suite is asked, and with which key; where its answers are kept, as those of `millrace gate`.
_URL_VARIABLE, _KEY_VARIABLE, _STATE_VARIABLE = "MILLRACE_URL", "MILLRACE_API_KEY", "MILLRACE_STATE_DIR"
EXIT_STATUS = {RolloutState.DONE: 0, RolloutState.TAKEN_BACK: 1}


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where the candidate has all requests, 1 where it was taken back, 2 with one line on stderr for what
    cannot be done, 130 when interrupted: then the share stays, and the same command goes on.
    """
    given = vars(_parser().parse_args(arguments))
    options = argparse.Namespace(**{"config": None, "target": [], "url": "", **given})
    try:
        tables = read_tables(options.config)
        settings = load_settings(tables)
        url = settings.gateway.rollout.url or settings.gateway.ledger.url
        if not url:
            raise ConfigError(
                "gateway.rollout.url: neither it nor gateway.ledger.url names a database; set one that all "
                "gateways share"
            )
        traces = RolloutTraces.of(tables) if options.command in _DECIDING else RolloutTraces()
        with closing(traces), closing(RolloutStore(url, traces=traces)) as store:
            return int(options.command(store, settings, options))
    except (ConfigError, SQLAlchemyError) as error:
        print(f"millrace rollout: {str(error).splitlines()[0]}", file=sys.stderr)
    except RolloutMoved:
        print("millrace rollout: somebody else has decided meanwhile; look again", file=sys.stderr)
    except WatchedElsewhere as error:
        print(f"millrace rollout: {error} watches it now", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted; the share stays as it is, and the same command goes on", file=sys.stderr)
        return 130
    return 2


def run(store: RolloutStore, settings: Settings, options: argparse.Namespace) -> int:
    """Begins a rollout, or goes on with it, and watches it."""
    if not options.target:
        raise ConfigError("no gateway is named; start a stack, or name --target gateway=HOST:PORT of metrics")
    names = [each.partition("=")[2] for each in options.target]
    who = watcher()
    rollout = _begun(store, settings, options, who)
    watch = RolloutWatch(
        store,
        rollout,
        scrape=scraper(names),
        watcher=who,
        run_suite=partial(
            run_suite,
            url=_asked(options),
            api_key=os.environ.get(_KEY_VARIABLE, ""),
            folder=Path(os.environ.get(_STATE_VARIABLE) or ".millrace") / "gate",
        ),
        tell=report.tell,
    )
    return EXIT_STATUS[asyncio.run(watch.run()).state]


def status(store: RolloutStore, settings: Settings, options: argparse.Namespace) -> int:
    """Shows every alias's rollout."""
    found = [each for each in store.all_latest() if options.alias in ("", each.sides.alias)]
    report.show_status(found, as_json=options.json)
    return 0


def history(store: RolloutStore, settings: Settings, options: argparse.Namespace) -> int:
    """Shows decisions."""
    report.show_history(store.decisions(options.alias, options.limit), as_json=options.json)
    return 0


def advance(store: RolloutStore, settings: Settings, options: argparse.Namespace) -> int:
    """Takes the next step by hand."""
    return _by_hand(store, options, RolloutAction.ADVANCE)


def abort(store: RolloutStore, settings: Settings, options: argparse.Namespace) -> int:
    """Takes the candidate back by hand."""
    return _by_hand(store, options, RolloutAction.TAKE_BACK)


# Commands whose decisions are spans.
_DECIDING = (run, advance, abort)


def _by_hand(store: RolloutStore, options: argparse.Namespace, action: RolloutAction) -> int:
    rollout = store.latest(options.alias)
    if rollout is None or rollout.state is not RolloutState.RUNNING:
        raise ConfigError(
            f"alias {options.alias!r} has no rollout that runs; `millrace rollout status` shows all"
        )
    decision = RolloutDecision(
        action=action,
        why=Why.BY_HAND,
        reason=options.reason,
        evidence=tuple(judge(rollout.progress.tally.counts, rollout.plan)),
    )
    report.tell(store.decide(rollout, decision, _person()), decision)
    return 0


def _begun(store: RolloutStore, settings: Settings, options: argparse.Namespace, who: str) -> StoredRollout:
    sides, configured = _sides(settings, options.alias, options.candidate)
    plan = read_plan(options.plan)
    found = store.latest(sides.alias)
    if found is None or found.state is not RolloutState.RUNNING:
        _check_base(store, sides, configured)
        _check_suite(plan, options)
        begun = store.begin(sides, configured, plan, _person(), who)
        report.tell(begun, RolloutDecision(action=RolloutAction.BEGIN, why=Why.GOOD, reason="it begins"))
        return begun
    if found.sides.candidate != sides.candidate:
        raise ConfigError(
            f"alias {sides.alias!r} has a rollout of {found.sides.candidate!r} that runs; end it first: "
            f"millrace rollout abort {sides.alias}"
        )
    _check_plan(found, plan, options.plan)
    _check_suite(found.plan, options)
    return _taken_over(store, found, who)


def _asked(options: argparse.Namespace) -> str:
    """Server that answers the suite, with its scheme; "" where none is named."""
    url = str(options.url or os.environ.get(_URL_VARIABLE, ""))
    return url if "//" in url or not url else f"http://{url}"


def _check_suite(plan: RolloutPlan, options: argparse.Namespace) -> None:
    """Raises ConfigError for a suite that could never be run, before anything moves."""
    if plan.gate is None:
        return
    path = Path(plan.gate.suite) if plan.gate.suite else None
    check_cases(read_suite(path), path)
    if urlsplit(_asked(options)).scheme not in ("http", "https"):
        raise ConfigError(
            f"the plan's [gate] asks a server, and {_asked(options)!r} is none; name it by --url "
            f"http://HOST:PORT or {_URL_VARIABLE}, and its key by {_KEY_VARIABLE}"
        )


def _sides(settings: Settings, alias: str, candidate: str) -> tuple[Sides, dict[str, float]]:
    """Who is compared, and the file's weights; raises ConfigError naming what the file lacks."""
    routes = settings.models.routes
    if alias not in routes:
        known = ", ".join(sorted(routes)) or "none"
        raise ConfigError(f"[routes] has no alias {alias!r}; known: {known}")
    configured = routes[alias]
    if candidate not in configured:
        raise ConfigError(
            f"routes.{alias}: it does not name {candidate!r}, so gateways would not know it; add "
            f'"{candidate}" = 0 there'
        )
    others = tuple(name for name in configured if name != candidate)
    if not sum(configured[name] for name in others):
        raise ConfigError(f"routes.{alias}: no other model has a weight, so there is nothing to compare with")
    return Sides(alias, candidate, others), dict(configured)


def _check_base(store: RolloutStore, sides: Sides, configured: dict[str, float]) -> None:
    """Raises ConfigError where an earlier rollout's end is not in the file, which would be undone."""
    left = store.in_force(sides.alias)
    if left is None or left.configured != configured:
        return
    wanted = weights_of(configured, sides.candidate, 0.0)
    is_alone = not any(left.weights[name] for name in sides.baseline)
    found = wanted if is_alone else weights_of(left.weights, sides.candidate, 0.0)
    if is_alone or any(not math.isclose(found[name], wanted[name], abs_tol=1e-6) for name in wanted):
        shown = ", ".join(f'"{name}" = {weight:g}' for name, weight in left.weights.items())
        raise ConfigError(
            f"routes.{sides.alias}: the end of the last rollout holds, and is not in the file; write "
            f"{sides.alias} = {{{shown}}} there first"
        )


def _check_plan(found: StoredRollout, plan: RolloutPlan, path: Path | None) -> None:
    if path is not None and plan != found.plan:
        raise ConfigError(
            f"--plan {path}: the rollout that runs was begun with another plan; leave it out to go on, or "
            f"end it first: millrace rollout abort {found.sides.alias}"
        )


def _taken_over(store: RolloutStore, found: StoredRollout, who: str) -> StoredRollout:
    """Goes on where a watcher is gone; waits for a moment for one that was just killed."""
    lease_s = max(_LEASE_S, 3 * found.plan.interval_s)
    first_beat = found.beat_unix_ms
    while (silent_s := time.time() - found.beat_unix_ms / 1000) < lease_s:
        if found.beat_unix_ms != first_beat:
            raise ConfigError(f"{found.watcher} watches this rollout; `millrace rollout status` shows it")
        time.sleep(min(0.2, found.plan.interval_s))
        found = store.read(found.id)
    reason = f"{who} goes on; nobody had watched for {silent_s:.0f} s"
    decision = RolloutDecision(action=RolloutAction.HOLD, why=Why.RESUMED, reason=reason)
    claimed = store.decide(store.claim(found, who), decision, who)
    report.tell(claimed, decision)
    return claimed


def watcher() -> str:
    """Names this process: who, where, which."""
    return f"{_person()}:{os.getpid()}"


def _person() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        # A container's user may have no name.
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"[:110]


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument("--config", type=Path, help="configuration file (TOML)")
    common.add_argument(
        "--target", action="append", metavar="NAME=HOST:PORT", help="metrics of gateways; the running stack's"
    )
    common.add_argument("--url", help="server that answers the gate's suite; the running stack's")
    parser = argparse.ArgumentParser(prog="millrace rollout", description=__doc__, parents=[common])
    commands = parser.add_subparsers(required=True, metavar="command")
    started = commands.add_parser("run", parents=[common], help="begin a rollout, or go on with it")
    started.add_argument("alias", help="alias of [routes]")
    started.add_argument("candidate", help="model of the alias that is to get all requests")
    started.add_argument("--plan", type=Path, help="rollout.toml: steps and limits; see docs/rollout.md")
    started.set_defaults(command=run)
    for name, command, about in (
        ("status", status, "show where rollouts are"),
        ("history", history, "show decisions with their evidence"),
    ):
        shown = commands.add_parser(name, parents=[common], help=about)
        shown.add_argument("alias", nargs="?", default="", help="this alias alone")
        shown.add_argument("--json", action="store_true", help="machine-readable output")
        shown.set_defaults(command=command)
        if command is history:
            shown.add_argument("--limit", type=int, default=50, help="so many of the latest")
    for name, command, about in (
        ("advance", advance, "take the next step now"),
        ("abort", abort, "take the candidate back now"),
    ):
        ordered = commands.add_parser(name, parents=[common], help=about)
        ordered.add_argument("alias", help="alias of [routes]")
        ordered.add_argument("--reason", default="by hand", help="kept with the decision")
        ordered.set_defaults(command=command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
