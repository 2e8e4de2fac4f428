"""What the whole path costs when the engine answers instantly: Envoy, gateway, tokenizer, engine and back.

`python -m benchmarks.gateway_overhead [--quick] [--litellm ENVIRONMENT] [--output FILE]`

One gateway process; authentication, limits, tracing and ledger are on. Four loads on `/v1/chat/completions`:

  alone      one request at a time, one token: added latency
  rate       32 at a time, one token: requests per second
  stream     64 streams of 128 tokens at full speed: tokens per second
  paced      256 streams at 20 ms a token: share of tokens that come within 50 ms of when they are due

A chunk is due one engine step after the one before it; chunks that come together with a late one are late as
well. The share by the schedule that a stream's first chunk begins stands beside it: there a stall costs the
chunks that it delays beyond the limit, and time that is lost for good every chunk after it. The same loads
run in the same run on a back end that costs nothing (`direct`) and, with `--litellm`, on one worker of
LiteLLM's proxy before it. To set LiteLLM up:

  python -m venv ENVIRONMENT && ENVIRONMENT/bin/pip install 'litellm[proxy]==1.106.2'
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from benchmarks.gateways import peers
from benchmarks.gateways.load import STEP_MS, Figures, Load, Peer, run_loads
from services.bench.report import machine

Results = dict[str, dict[str, Figures]]
_FLOOR = "direct"


class Verdict(msgspec.Struct, frozen=True):
    """One load's figure beside its target and beside LiteLLM's. Of latencies, less is better."""

    figure: str
    millrace: float
    target: float
    met: bool
    litellm: float | None = None
    # How many times better than LiteLLM. Of the paced load by what reaches the clients, tokens per second: a
    # gateway that falls behind joins the tokens that wait, and none of their gaps need be long.
    times_litellm: float | None = None


def loads(scale: int) -> dict[str, Load]:
    """The four loads, with a `scale`-th of the requests."""
    return {
        "alone": Load(1, max(100, 1000 // scale), 1),
        "rate": Load(32, 10_000 // scale, 1),
        "stream": Load(64, max(64, 1280 // scale), 128),
        "paced": Load(256, 512 if scale == 1 else 256, 128 if scale < 10 else 32),
    }


def run_millrace(wanted: dict[str, Load], checkout: Path | None = None) -> dict[str, Figures]:
    """Our stack, this or another checkout's, once with an instant engine and once with a paced one."""
    found: dict[str, Figures] = {}
    for step_ms, names in ((0.0, ("alone", "rate", "stream")), (STEP_MS, ("paced",))):
        with peers.millrace(step_ms, checkout) as state:
            peer, processes = peers.own(state)
            found |= asyncio.run(run_loads(peer, {name: wanted[name] for name in names}, processes))
    return found


def run_others(wanted: dict[str, Load], scale: int, environment: Path | None) -> Results:
    """The back end alone, and LiteLLM with a tenth of the requests: it is that much slower."""
    results: Results = {}
    with ExitStack() as stack:
        steps = {"instant": 0.0, "paced": STEP_MS}
        ports = {name: stack.enter_context(peers.backend(step_ms)) for name, step_ms in steps.items()}
        results[_FLOOR] = _run({name: peers.direct(port) for name, port in ports.items()}, wanted)
        if environment is not None:
            few = loads(scale * 10)
            slow = {**few, "paced": wanted["paced"], "rate": Load(32, max(640, few["rate"].num_requests), 1)}
            with peers.litellm(environment, ports, workers=1) as found:
                results["litellm"] = _run(found, slow)
    return results


def _run(found: dict[str, Peer], wanted: dict[str, Load]) -> dict[str, Figures]:
    instant = {name: load for name, load in wanted.items() if name != "paced"}
    return {
        **asyncio.run(run_loads(found["instant"], instant)),
        **asyncio.run(run_loads(found["paced"], {"paced": wanted["paced"]})),
    }


# What is judged of each load, its target, and its value, given the figures of the back end alone as well.
TARGETS: dict[str, tuple[str, float, Callable[[Figures, Figures], float]]] = {
    "alone": ("added p50, ms", 4.0, lambda of, floor: of.latency_p50_ms - floor.latency_p50_ms),
    "rate": ("requests/s", 800.0, lambda of, floor: of.requests_per_s),
    "stream": ("tokens/s", 20_000.0, lambda of, floor: of.tokens_per_s),
    "paced": ("share on time", 0.999, lambda of, floor: of.on_time),
}


def judge(results: Results) -> dict[str, Verdict]:
    """Each load's figure against its target, and against LiteLLM where it ran."""
    own, other, floor = results["millrace"], results.get("litellm"), results[_FLOOR]["alone"]
    verdicts = {}
    for load, (figure, target, value) in TARGETS.items():
        less_is_better = load == "alone"
        mine = value(own[load], floor)
        met = mine <= target if less_is_better else mine >= target
        if other is None:
            verdicts[load] = Verdict(figure, mine, target, met)
            continue
        theirs = value(other[load], floor)
        if load == "paced":
            times = own[load].tokens_per_s / other[load].tokens_per_s
        else:
            times = theirs / mine if less_is_better else mine / theirs
        verdicts[load] = Verdict(figure, mine, target, met, theirs, times)
    return verdicts


def _versions(environment: Path | None) -> dict[str, str]:
    if environment is None:
        return {}
    command = [str(environment / "bin" / "pip"), "show", "litellm"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {"litellm": next(line.split()[1] for line in shown.splitlines() if line.startswith("Version"))}


def main() -> None:
    """Prints the figures, and writes them with the machine when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--litellm", type=Path, help="virtual environment with litellm[proxy]")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()
    scale = 10 if arguments.quick else 1
    wanted = loads(scale)
    results: Results = {"millrace": run_millrace(wanted)}
    results |= run_others(wanted, scale, arguments.litellm)
    verdicts = judge(results)
    for name, each in verdicts.items():
        beside = (
            "" if each.litellm is None else f"   LiteLLM {each.litellm:.4g}: {each.times_litellm:.1f} times"
        )
        print(
            f"{name:8} {each.figure:14} {each.millrace:10.4g}   target {each.target:g} "
            f"{'met' if each.met else 'MISSED'}{beside}"
        )
    if arguments.output is not None:
        report = {
            "machine": {**machine(), **_versions(arguments.litellm)},
            "loads": wanted,
            "verdicts": verdicts,
            "results": results,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


if __name__ == "__main__":
    main()
