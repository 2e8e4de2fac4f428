"""Batches beside others, of a million lines, and under gateways and engines that are killed.

`python -m benchmarks.batches beside [--lines 10000] [--rate 2] [--seconds 80]`: interactive chats at a rate,
alone and beside the batches of two tenants, in turns on one stack: their time to the first token, and what
share of the batches' tokens each tenant gets. It takes some three minutes; the machine should be quiet.

`python -m benchmarks.batches million [--lines 1000000]`: so many lines are indexed, answered and taken over
as gateways do, beside a tenth of them: memory and seconds of each step. It takes some two minutes.

`python -m benchmarks.batches killed [--lines 10000] [--kills 8]`: a batch on simulated engines, while two
gateways, two engines and the tokenizer service are killed in turn: how often each line was answered, in the
results and in the ledger. It ends with 1 if that is not once.

Each writes its figures as JSON with --json.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from benchmarks.batches import beside, killed, million
from benchmarks.engine.report import options
from benchmarks.stack import write_result


def main() -> None:
    """Prints the figures."""
    parser = options(__doc__)
    parser.add_argument("what", choices=("beside", "million", "killed"))
    parser.add_argument("--lines", type=int, help="of the batch")
    parser.add_argument("--rate", type=float, default=2.0, help="chats a second")
    parser.add_argument("--seconds", type=float, default=80.0, help="alone, and beside batches")
    parser.add_argument("--kills", type=int, default=8, help="processes that are killed")
    chosen = parser.parse_args()
    figures: Mapping[str, Any]
    if chosen.what == "million":
        figures = million.run(chosen.lines or 1_000_000)
    elif chosen.what == "killed":
        figures = killed.run(chosen.lines or 10_000, chosen.kills)
    else:
        figures = asyncio.run(beside.run(chosen.lines or 10_000, chosen.rate, chosen.seconds))
    for name, value in figures.items():
        print(f"{name:32} {value}")
    write_result(chosen.json, {"results": figures} if chosen.what == "million" else figures)
    if figures.get("broken"):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
