"""The page's tables of recorded runs: every form of weights has its quality beside its speed."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from benchmarks.peers import tables
from benchmarks.peers.checkpoints import attention_operations, matrix_parameters
from benchmarks.peers.roofline import Machine, prefill_bound_tokens_per_s
from benchmarks.peers.tables import FORMS, Recorded, Run, precision_of, quality_table


def run(server: str, load: str, rate: float) -> Run:
    return Run(
        server=server, load=load, output_tokens_per_s=rate, ttft_mean_ms=1, ttft_p99_ms=1, tpot_mean_ms=1,
        itl_p99_ms=1, num_failed=0,
    )  # fmt: skip


def recorded(*runs: Run) -> Recorded:
    return Recorded(machine={}, checkpoint="small", runs=list(runs), start_s={}, rss_bytes={})


def row(form: str) -> dict[str, object]:
    return {"form": form, "perplexity": 1.25, "same %": 99.5, "weights MiB": 7.0}


def test_quality_stands_beside_speed(tmp_path: Path) -> None:
    rows = [row(FORMS["bf16"]), row(FORMS["int4"]), row("GGUF Q4_K")]
    (tmp_path / "quantization.json").write_bytes(msgspec.json.encode({"title": "Quality", "rows": rows}))
    alone = recorded(
        run("millrace-bf16", "1", 7), run("millrace-int4", "1", 30), run("millrace-int4", "8", 90)
    )
    (tmp_path / "forms_small.json").write_bytes(msgspec.json.encode(alone))
    beside_peers = recorded(
        run("millrace-bf16", "1", 10),
        run("millrace-bf16", "1", 14),
        run("millrace-bf16", "8", 40),
        run("vllm", "1", 9),
    )
    lines = quality_table(tmp_path / "quantization.json", [beside_peers])
    assert [line for line in lines if line.startswith("| ")] == [
        "| form | perplexity | likeliest token is float32's | weights | small, tokens/s at 1, 8 |",
        "| bfloat16 | 1.2500 | 99.50 % | 7.0 MiB | 12, 40 |",
        "| int4, groups of 64, int8 KV, bfloat16 | 1.2500 | 99.50 % | 7.0 MiB | 30, 90 |",
        "| GGUF Q4_K | 1.2500 | 99.50 % | 7.0 MiB |  |",
    ]


RATES = {"read_bytes_per_s": 2e10, "bfloat16_flops_per_s": 6e11, "int8_ops_per_s": 1e12}


@pytest.mark.parametrize("has_torch", [True, False])
def test_the_roofline_stands_beside_that_of_torch(has_torch: bool) -> None:
    """Older records have only the best rate of multiplication, and are shown without the other."""
    machine: dict[str, object] = {**RATES, **({"torch_bfloat16_flops_per_s": 1.5e11} if has_torch else {})}
    runs = [run("millrace-bf16", load, 20) for load in ("32", "prefill")] + [run("millrace-w8a8", "32", 20)]
    lines = Recorded(machine=machine, checkpoint="qwen3-0.6b", runs=runs, start_s={}, rss_bytes={}).table()
    bf16, w8a8 = ([cell.strip() for cell in line.split("|")] for line in lines if line.startswith("| 32"))
    best, torchs = (bf16[index].partition(" of ")[2] for index in (5, 7))
    assert w8a8[6] == w8a8[7] == ""
    assert bf16[6] == ""
    assert (int(torchs) < int(best) / 2) if has_torch else not torchs
    assert ("torch's bfloat16 product 0.15 TFLOP/s" in lines[0]) == has_torch
    (prefill,) = (line for line in lines if line.startswith("- millrace-bf16"))
    shares = [int(part) for part in re.findall(r"(\d+)%", prefill)]
    assert len(shares) == (2 if has_torch else 1)
    assert shares == sorted(shares)


def test_every_form_that_can_be_run_beside_peers_has_a_recorded_quality() -> None:
    assert set(FORMS) == set(tables.OURS) - {tables.OF_THE_FILE}
    measured = {row["form"] for row in msgspec.json.decode(tables.QUALITY.read_bytes())["rows"]}
    assert set(FORMS.values()) <= measured
    kinds = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
    assert {f"GGUF {kind}" for kind in kinds} <= measured


def test_attention_of_prompts_is_counted() -> None:
    """A token sees those before it and half of its own prompt: 4 operations for each element of a key."""
    width = 28 * 16 * 128
    assert attention_operations("qwen3-0.6b", 2048) == 2 * width * 2048**2
    assert attention_operations("qwen3-0.6b", 64, before=1024) == 4 * width * (64 * 1024 + 32 * 64)
    fast, slow = (
        Machine(
            read_bytes_per_s=2e10,
            bfloat16_flops_per_s=rate,
            int8_ops_per_s=1e12,
            torch_bfloat16_flops_per_s=0,
        )
        for rate in (6e11, 3e11)
    )
    products_s = 2 * (matrix_parameters("qwen3-0.6b") - 151_936 * 1024) * 2048 / 1e12
    attention_s = 2 * width * 2048**2 / 6e11
    w8a8 = precision_of("millrace-w8a8")
    assert prefill_bound_tokens_per_s(fast, "qwen3-0.6b", w8a8, 2048) == pytest.approx(
        2048 / (products_s + attention_s)
    )
    bounds = [prefill_bound_tokens_per_s(machine, "qwen3-0.6b", w8a8, 2048) for machine in (fast, slow)]
    assert bounds[1] < bounds[0] < 2 * bounds[1], "its products multiply int8, its attention does not"


def test_fewer_bytes_read_than_stored_raise_the_bound() -> None:
    """One stream is bound by reading: twelve bits of sixteen allow a third more than the KV leaves."""
    machine: dict[str, object] = {**RATES, "read_bytes_per_bfloat16": 1.5}
    runs = [run(server, "1", 15) for server in ("millrace-bf16", "millrace-w8a8")]
    lines = Recorded(machine=machine, checkpoint="qwen3-0.6b", runs=runs, start_s={}, rss_bytes={}).table()
    bf16, w8a8 = ([cell.strip() for cell in line.split("|")] for line in lines if line.startswith("| 1 "))
    stored, read = (int(bf16[index].partition(" of ")[2]) for index in (5, 6))
    assert 1.2 * stored < read < stored * 4 / 3
    assert w8a8[6] == ""
