"""The load generator against a small server that answers like an OpenAI-compatible one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from runtime.errors import ConfigError
from services.bench import report
from services.bench.client import BenchTarget, Client
from services.bench.records import RequestRecord, Targets, summarize
from services.bench.run import run_workload
from services.bench.workload import Arrivals, Lengths, Workload, plan
from services.cli.app import app


def workload(**changes: object) -> Workload:
    settings: dict[str, object] = {
        "num_requests": 12,
        "arrivals": Arrivals(concurrency=4),
        "input_tokens": Lengths.parse("uniform:5:20"),
        "output_tokens": Lengths.parse("7"),
    }
    return Workload(**{**settings, **changes})  # type: ignore[arg-type]


@asynccontextmanager
async def server(
    *, fail_every: int = 0, cut: bool = False, hang_up: bool = False
) -> AsyncIterator[tuple[BenchTarget, list[dict[str, object]]]]:
    """Streams max_tokens chunks, in one-byte-shifted writes, so that events straddle reads."""
    received: list[dict[str, object]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                writer.close()
                return
            if head.startswith(b"GET"):
                body = b'{"data":[{"id":"nano"}]}'
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
                writer.close()
                return
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            request = json.loads(await reader.readexactly(length))
            received.append(request)
            if fail_every and len(received) % fail_every == 0:
                body = b'{"error":{"message":"slow down"}}'
                writer.write(b"HTTP/1.1 429 Too Many\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
                continue
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            events = [json.dumps({"choices": [{"text": "x"}]}) for _ in range(request["max_tokens"])]
            usage = {"prompt_tokens": len(request["prompt"]), "completion_tokens": request["max_tokens"]}
            events.append(json.dumps({"choices": [], "model": "another", "usage": usage}))
            stream = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
            for start in range(0, len(stream), 33):
                piece = stream[start : start + 33]
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                if cut and start > 60:
                    writer.transport.abort()
                    return
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            if hang_up:
                writer.close()
                return

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    try:
        yield BenchTarget.parse(f"http://127.0.0.1:{port}/v1", "key"), received
    finally:
        listener.close()


async def test_counts_tokens_and_chunks_however_the_stream_is_cut() -> None:
    async with server() as (target, received):
        records, duration = await run_workload(target, workload(), "nano", on_progress=lambda record: None)
    assert len(received) == 12
    assert all(record.ok and len(record.chunk_times_s) == record.completion_tokens == 7 for record in records)
    assert [record.prompt_tokens for record in records] == [
        request.prompt_tokens for request in plan(workload(), "nano")
    ]
    assert summarize(records, duration, Targets()).completion_tokens == 84
    # The answer says who gave it, whoever was asked.
    assert {record.model for record in records} == {"another"}


async def test_failures_are_counted_with_their_reason_and_leave_the_others_alone() -> None:
    async with server(fail_every=4) as (target, _):
        records, _ = await run_workload(target, workload(), "nano", on_progress=lambda record: None)
    failed = [record for record in records if not record.ok]
    assert len(failed) == 3
    assert all(record.status == 429 and "slow down" in record.error for record in failed)


async def test_a_stream_that_is_cut_is_a_failure() -> None:
    async with server(cut=True) as (target, _):
        records, _ = await run_workload(
            target, workload(num_requests=2), "nano", on_progress=lambda record: None
        )
    assert all(not record.ok and "ConnectionError" in record.error for record in records)


async def test_a_server_that_hangs_up_after_each_answer_is_asked_again() -> None:
    async with server(hang_up=True) as (target, received):
        records, _ = await run_workload(target, workload(), "nano", on_progress=lambda _: None)
    assert all(record.ok for record in records)
    assert len(received) == len(records)


async def test_models_are_listed_and_an_absent_server_is_named() -> None:
    async with server() as (target, _):
        assert await Client(target).models() == ["nano"]
    with pytest.raises(ConfigError, match="is the server running"):
        await Client(BenchTarget.parse("http://127.0.0.1:9", "")).models()


def test_equal_seeds_plan_equal_requests_and_prefixes_are_shared() -> None:
    planned = plan(workload(shared_prefix_tokens=16, tiers={"gold": 1, "bronze": 3}), "nano")
    assert planned == plan(workload(shared_prefix_tokens=16, tiers={"gold": 1, "bronze": 3}), "nano")
    prompts = [json.loads(request.body)["prompt"] for request in planned]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
    assert {request.tier for request in planned} <= {"gold", "bronze"}


def test_open_loop_arrivals_have_the_asked_rate() -> None:
    planned = plan(workload(num_requests=4000, arrivals=Arrivals(rate=50, burstiness=0.5)), "nano")
    starts = [request.start_s for request in planned]
    assert starts == sorted(starts)
    assert starts[-1] == pytest.approx(80, rel=0.1)


@pytest.mark.parametrize(
    "text",
    [
        *("", "many", "uniform:5", "uniform:0:5", "normal:5:6", "-3"),
        *("uniform:9:2", "lognormal:64:-1", "nan", "inf", "uniform:1:inf", "1e300"),
    ],
)
def test_a_length_that_cannot_be_read_is_quoted(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a number of tokens"):
        Lengths.parse(text)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--tier", "gold=-1"], "--tier 'gold=-1'"),
        (["--tier", "gold=nan"], "--tier 'gold=nan'"),
        (["--tier", "gold"], "--tier 'gold'"),
        (["--tier", "gold=1", "--tier", "gold=2"], "--tier 'gold=2'"),
        (["--rate", "inf"], "--rate"),
        (["--rate", "5", "--concurrency", "2"], "--concurrency"),
        (["--burstiness", "0.5"], "--burstiness"),
    ],
)
def test_options_that_would_be_ignored_or_cannot_be_meant_are_refused(options: list[str], named: str) -> None:
    # Nobody listens there: what cannot be meant is said before anybody is asked.
    outcome = CliRunner().invoke(app, ["bench", "run", "--url", "http://127.0.0.1:9", *options])
    assert (outcome.exit_code, named in outcome.output) == (2, True), outcome.output
    assert "is the server running" not in outcome.output


def test_long_tails_are_drawn() -> None:
    generator = np.random.default_rng(0)
    drawn = Lengths.parse("lognormal:64:1000").draw(generator, 100)
    assert (min(drawn), max(drawn)) == (1, 10_000_000)


def record(start: float, chunks: list[float], end: float) -> RequestRecord:
    return RequestRecord(
        index=0, tier="", prompt_tokens=3, status=200, start_s=start, end_s=end, chunk_times_s=chunks,
        completion_tokens=len(chunks),
    )  # fmt: skip


def test_latencies_are_those_of_a_hand_made_stream() -> None:
    summary = summarize([record(1.0, [1.1, 1.2, 1.4], 1.5)], 2.0, Targets(ttft_ms=150, tpot_ms=100))
    assert summary.ttft_ms is not None
    assert summary.tpot_ms is not None
    assert summary.itl_ms is not None
    assert summary.ttft_ms.p50 == pytest.approx(100)
    assert summary.tpot_ms.mean == pytest.approx(150)
    assert summary.itl_ms.max == pytest.approx(200)
    assert summary.output_tokens_per_s == pytest.approx(1.5)
    assert summary.goodput_per_s == 0


def test_results_survive_writing_and_are_compared(tmp_path: Path) -> None:
    result = report.make_result(
        label="one", url="u", model="m", workload=workload(), targets=Targets(),
        records=[record(0, [0.1, 0.2], 0.3)], duration_s=1.0,
    )  # fmt: skip
    report.write(result, tmp_path / "one.json")
    assert report.read(tmp_path / "one.json") == result
    console = Console(record=True, width=120)
    report.show(result, console)
    report.show_comparison(result, result, console)
    assert "1.00" in console.export_text()
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a result"):
        report.read(tmp_path / "bad.json")
