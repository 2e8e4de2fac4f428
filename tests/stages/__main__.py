"""`python3 -m tests.stages [STAGE ...]`: runs the stages of table.toml, or those that are named.

Exits with 1 when a stage is red, or is left out for a reason that it does not allow. `CI_ALL=1` also runs the
stages whose files are as they were when they last passed.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from tests.stages.closing import write
from tests.stages.run import ROOT, Outcome, Result, interruption, run_stage
from tests.stages.table import Stage, read_table


def main(names: list[str]) -> int:
    """See the module."""
    stages = read_table()
    unknown = set(names) - {stage.name for stage in stages}
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(each.name for each in stages)}")
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interruption.arrive)
    began_s = time.monotonic()
    results: list[Result] = []
    asked = [stage for stage in stages if stage.name in names or not names]
    # A stage that is asked for by its name runs in any case.
    runs_all = bool(names) or os.environ.get("CI_ALL") == "1"
    for stage in asked:
        if not interruption.number:
            results.append(_result(stage, results, runs_all=runs_all))
    print(write(results, [stage.name for stage in asked], time.monotonic() - began_s, ROOT), flush=True)
    if interruption.number:
        return 128 + interruption.number
    return 1 if any(result.outcome is Outcome.RED for result in results) else 0


def _result(stage: Stage, before: list[Result], *, runs_all: bool) -> Result:
    broken = [each.stage for each in before if each.is_foundation and each.outcome is Outcome.RED]
    if broken:
        return Result(stage.name, Outcome.RED, 0.0, f"not run: {broken[0]} is red")
    return run_stage(stage, runs_all=runs_all)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
