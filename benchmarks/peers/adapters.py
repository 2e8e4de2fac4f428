"""Adapters behind a whole server: Millrace beside vLLM's CPU build with the same checkpoint and adapters.

`python -m benchmarks.peers.adapters [--checkpoint llama-40m] [--streams 8] [--rank 16] [--rounds 2]
    [--environments DIR] [--json FILE]`

Random adapters of every linear layer, in PEFT's format. As many streams as adapters, each of which asks for
its own, and as many of the plain model; both servers run at once and take turns (A B B A …). Both compute in
bfloat16. Prints tokens per second of all streams and their ratio.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from safetensors.numpy import save_file

from benchmarks.engine.report import Row, options, publish
from benchmarks.peers import vllm_cpu
from benchmarks.peers.checkpoints import SHAPES, make_checkpoint
from benchmarks.peers.loads import Load
from benchmarks.peers.millrace import millrace
from benchmarks.peers.servers import Server, ServerFailed, serve
from engine.adapters.peft import Module
from engine.config import AdaptersConfig, EngineConfig
from engine.runner.build import build_here
from runtime.config import ModelConfig
from services.bench.client import BenchTarget
from services.bench.run import run_workload

OF_A_STREAM = Load(concurrency=1, num_requests=3)


def write_adapter(folder: Path, modules: Mapping[str, Module], *, rank: int, seed: int) -> Path:
    """A random adapter of all modules, as PEFT writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    tensors = {}
    for name, module in modules.items():
        for part, shape in (("A", (rank, module.inputs)), ("B", (module.outputs, rank))):
            values = 0.01 * draw.standard_normal(shape, np.float32)
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = values
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name in modules})
    values = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(values | {"target_modules": targets}))
    return folder


def make_adapters(checkpoint: Path, folder: Path, num: int, rank: int) -> dict[str, Path]:
    """Folders of random adapters, by name."""
    config = EngineConfig(max_model_len=1024, adapters=AdaptersConfig(slots=1, max_rank=rank))
    runner, _, _ = build_here(config, ModelConfig(path=str(checkpoint)), lambda stage, part: None)
    modules = runner.adapters.modules
    made = {
        f"a{each}": write_adapter(folder / f"a{each}", modules, rank=rank, seed=each) for each in range(num)
    }
    runner.close()
    return made


def lora_options(adapters: Mapping[str, Path], rank: int) -> tuple[str, ...]:
    """vLLM's own for these adapters."""
    named = [f"{name}={path}" for name, path in adapters.items()]
    size = ("--max-loras", str(len(adapters)), "--max-lora-rank", str(rank))
    return ("--enable-lora", *size, "--lora-modules", *named)


async def tokens_per_s(server: Server, models: Sequence[str], seed: int) -> float:
    """Of one stream for each model, all at once, after a request of two tokens for each."""
    target = BenchTarget.parse(server.url, server.api_key)
    loads = [OF_A_STREAM.workload(seed + number) for number in range(len(models))]
    short = replace(OF_A_STREAM, num_requests=1, output_tokens=2)
    for number, model in enumerate(models):
        await run_workload(target, short.workload(seed - 1 - number), model, on_progress=lambda _: None)
    runs = await asyncio.gather(
        *(
            run_workload(target, load, model, on_progress=lambda _: None)
            for load, model in zip(loads, models, strict=True)
        )
    )
    records = [record for found, _ in runs for record in found]
    failed = [record.error for record in records if record.error]
    if failed:
        raise ServerFailed(f"{server.name}: {len(failed)} failed: {failed[0]}")
    return sum(record.completion_tokens for record in records) / max(seconds for _, seconds in runs)


def compare(servers: Sequence[Server], kinds: dict[str, list[list[str]]], rounds: int) -> list[Row]:
    """A row for each kind of load: medians, and that of the ratios of neighbouring runs."""
    rows: list[Row] = []
    for kind, models in kinds.items():
        found: dict[str, list[float]] = {server.name: [] for server in servers}
        for number in range(rounds):
            order = list(zip(servers, models, strict=True))
            for server, own in order if number % 2 == 0 else order[::-1]:
                rate = asyncio.run(tokens_per_s(server, own, 1000 * (number + 1)))
                print(f"{server.name:10} {kind:16} {rate:8.1f} tokens/s", flush=True)
                found[server.name].append(rate)
        theirs, ours = found.values()
        rows.append(
            {
                "load": kind,
                "vllm tokens/s": median(theirs),
                "millrace tokens/s": median(ours),
                "ratio": median(own / other for own, other in zip(ours, theirs, strict=True)),
            }
        )
    return rows


def main() -> None:
    """Prints the figures."""
    parser = options(__doc__)
    parser.add_argument("--checkpoint", choices=sorted(SHAPES), default="llama-40m")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    asked = parser.parse_args()
    folder = asked.environments.resolve()
    checkpoint = make_checkpoint(asked.checkpoint, folder)
    with tempfile.TemporaryDirectory(prefix="millrace-adapters-") as scratch:
        adapters = make_adapters(checkpoint, Path(scratch), asked.streams, asked.rank)
        settings = {
            "dtype": "bfloat16",
            "adapters.slots": asked.streams,
            "adapters.max_rank": asked.rank,
            **{f"adapters.paths.{name}": str(path) for name, path in adapters.items()},
        }
        bare = vllm_cpu.prepare(folder, checkpoint, lora_options(adapters, asked.rank))
        with (
            serve("vllm", bare, folder / "adapters-vllm.log") as vllm,
            millrace("millrace", checkpoint, folder / "adapters-millrace.log", settings) as own,
        ):
            kinds = {
                "none": [[str(checkpoint)] * asked.streams, [own.model] * asked.streams],
                f"{asked.streams} adapters": [list(adapters), [f"{own.model}:{name}" for name in adapters]],
            }
            rows = compare([vllm, own], kinds, asked.rounds)
    publish(f"{asked.streams} streams of {asked.checkpoint}, adapters of rank {asked.rank}", rows, asked.json)


if __name__ == "__main__":
    main()
