"""1,000 tokens in, 1,000 out, 256 at a time, through sockets: Envoy, gateways, tokenizer service and engine
as `millrace up` starts them, load from processes of their own. What TensorRT-LLM publishes for this shape on
an H200 in FP8 (Llama-3.1-8B, 1,000/1,000: 17,744 output tokens/s) stands beside it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.device import BLOCK_SIZE, Gpu
from benchmarks.gpu.environment import is_there
from benchmarks.gpu.random_model import shape_of, write_checkpoint
from benchmarks.gpu.report import Report
from benchmarks.gpu.serving import PUBLISHED_TOKENS_PER_S
from benchmarks.in_process import DRAWS

ROOT = Path(__file__).resolve().parents[2]
# Needed by the stack beside the engine's core; where one is missing, nothing is served through sockets.
PACKAGES = (
    "msgspec",
    "httptools",
    "uvicorn",
    "opentelemetry.sdk",
    "grpc_health",
    "sqlalchemy",
    "jsonschema_rs",
    "redis",
)
# How tokens of each run are drawn.
RUNS = ("greedy", "greedy", "sampled", "greedy")
# Of all requests at once, one after another: beginning and end of a run count less the more there are.
MOST_WAVES = 3
CONFIG = """
[model]
path = "{folder}"
name = "drawn"
[supervisor]
engines = 1
gateways = {gateways}
start_limit_s = 150
[engine]
device = "{device}"
dtype = "{dtype}"
native = "{native}"
quantize = "{quantize}"
max_model_len = {max_model_len}
[engine.scheduler]
max_num_batched_tokens = {max_num_batched_tokens}
max_num_seqs = {max_num_seqs}
refuse_early = false
[engine.cache]
block_size = {block_size}
kv_dtype = "{kv_dtype}"
memory_fraction = 0.9
kv_cache_bytes = {kv_cache_bytes}
[gateway.ledger]
url = ""
"""


def run(gpu: Gpu, report: Report, *, kind: str) -> None:
    """Runs of the same load until the time is up; the first also warms caches and connections."""
    missing = [name for name in PACKAGES if not is_there(name)]
    if not is_there("envoy") and shutil.which("envoy") is None:
        missing.append("envoy")
    if missing:
        report.row(what="served", kind=kind, not_measured=f"not installed: {', '.join(missing)}")
        return
    from benchmarks.stack import running_stack

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder, shape_of(gpu, kind) | {"eos_token_id": 2})
        # What requests that name a temperature alone are drawn with.
        defaults = {name: DRAWS["sampled"][name] for name in ("top_p", "top_k")}
        (folder / "generation_config.json").write_text(json.dumps(defaults), encoding="utf-8")
        began = time.monotonic()
        with running_stack(_config(gpu, folder, kind), environment=_environment()) as stack:
            report.row(what="stack ready", kind=kind, seconds=time.monotonic() - began)
            took_s = 0.0
            for number, draw in enumerate(gpu.pick(RUNS, tuple(DRAWS))):
                waves = waves_within(gpu.left_s, took_s)
                if not waves:
                    break
                began = time.monotonic()
                _measure(gpu, report, stack.url, folder, kind, draw, waves=waves, is_first=number == 0)
                took_s = (time.monotonic() - began) / waves


def waves_within(left_s: float, wave_s: float) -> int:
    """How often a run may send all its requests at once, MOST_WAVES at most; one in the first run, of which
    nobody knows how long it takes (0).
    """
    return min(MOST_WAVES, int((left_s - 15) / (1.2 * wave_s))) if wave_s else 1


def _environment() -> dict[str, str]:
    """So that every process finds the project, and draws weights."""
    paths = [str(ROOT / "benchmarks/gpu/drawn"), str(ROOT), str(ROOT / "contract/stubs")]
    paths += [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def _config(gpu: Gpu, folder: Path, kind: str) -> str:
    return CONFIG.format(
        folder=folder,
        gateways=gpu.pick(4, 1),
        device=gpu.device.type,
        dtype=gpu.pick("bfloat16", "float32"),
        native=gpu.pick("auto", "off"),
        quantize={"fp8": gpu.pick("fp8", "int8")}.get(kind, "off"),
        max_model_len=gpu.pick(2100, 100),
        max_num_batched_tokens=gpu.pick(8192, 64),
        max_num_seqs=gpu.pick(256, 4),
        block_size=BLOCK_SIZE,
        kv_dtype="fp8" if kind == "fp8" else "auto",
        kv_cache_bytes=gpu.pick(0, 4 << 20),
    )


def _measure(
    gpu: Gpu, report: Report, url: str, folder: Path, kind: str, draw: str, *, waves: int, is_first: bool
) -> None:
    """One run: several load generators, each a closed loop of its share."""
    concurrency, num_in, num_out = gpu.pick((256, 1000, 1000), (3, 20, 6))
    requests = waves * concurrency
    generators = gpu.pick(4, 1)
    files = [folder / f"load-{number}.json" for number in range(generators)]
    command = [sys.executable, "-m", "services.cli", "bench", "run", "--url", url, "--key", "mr-dev-local"]
    command += ["--requests", str(requests // generators), "--concurrency", str(concurrency // generators)]
    command += ["--input-tokens", str(num_in), "--output-tokens", str(num_out), "--warmup", "0"]
    command += ["--vocab-size", str(shape_of(gpu, kind)["vocab_size"])]
    command += ["--temperature", str(DRAWS[draw]["temperature"])]
    began = time.monotonic()
    environment = os.environ | _environment()
    processes = [
        subprocess.Popen(
            [*command, "--seed", str(number), "--json", str(file)],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        for number, file in enumerate(files)
    ]
    try:
        codes = [process.wait(timeout=max(5.0, gpu.left_s - 5)) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if not all(file.exists() and file.stat().st_size for file in files):
        report.wrong(f"load generators ended with {codes}", what="served through sockets", kind=kind)
        return
    seconds = time.monotonic() - began
    totals = [json.loads(file.read_text())["total"] for file in files]
    # The slowest's: generators start within a moment of each other.
    duration = max(total["duration_s"] for total in totals)
    rate = sum(total["completion_tokens"] for total in totals) / duration
    row = {
        "what": "served through sockets" + (", first" if is_first else ""),
        "kind": kind,
        "sampling": draw,
        "concurrency": concurrency,
        "requests": sum(total["num_requests"] for total in totals),
        "failed_requests": sum(total["num_failed"] for total in totals),
        "seconds": seconds,
        "output_tokens_per_s": rate,
        "ttft_p50_ms": max((total["ttft_ms"] or {"p50": -1.0})["p50"] for total in totals),
        "tpot_p50_ms": max((total["tpot_ms"] or {"p50": -1.0})["p50"] for total in totals),
    }
    if any(codes) or row["failed_requests"]:
        report.wrong("requests failed", **row)
    elif is_first and gpu.pick(True, False):
        report.row(**row)
    else:
        report.row(**row, of_published=rate / PUBLISHED_TOKENS_PER_S)
