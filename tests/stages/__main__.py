"""`python3 -m tests.stages [STAGE ...]`: runs the stages of table.toml, or those that are named.

Exits with 1 when a stage is red. `CI_ALL=1` also runs the stages whose files are as they were when they last
passed; so does naming them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence

from tests.stages.closing import write
from tests.stages.commands import interruption
from tests.stages.run import ROOT, Outcome, Result, run_stage
from tests.stages.table import Stage, read_table


def main(names: Sequence[str]) -> int:
    """See the module."""
    stages = read_table()
    unknown = set(names) - {stage.name for stage in stages}
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(each.name for each in stages)}")
        return 2
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, interruption.arrive)
    began_s = time.monotonic()
    asked = [stage for stage in stages if stage.name in names or not names]
    results = _run(asked, runs_all=bool(names) or os.environ.get("CI_ALL") == "1")
    print(write(results, [stage.name for stage in asked], time.monotonic() - began_s, ROOT), flush=True)
    if interruption.number:
        return 128 + interruption.number
    return 1 if any(result.outcome is Outcome.RED for result in results) else 0


def _run(asked: Sequence[Stage], *, runs_all: bool) -> list[Result]:
    """What came of the stages; those that are missing were not reached before a signal."""
    results: list[Result] = []
    for stage in asked:
        if interruption.number:
            break
        broken = [each.stage for each in results if each.is_foundation and each.outcome is Outcome.RED]
        if broken:
            results.append(Result(stage.name, Outcome.RED, 0.0, f"not run: {broken[0]} is red"))
            continue
        try:
            results.append(run_stage(stage, runs_all=runs_all))
        except Exception as error:
            # Without git, for example. The table tells it, and what the others have found.
            traceback.print_exc()
            results.append(Result(stage.name, Outcome.RED, 0.0, f"{type(error).__name__}: {error}"))
    return results


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
