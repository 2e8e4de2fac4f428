"""What servers other than ours answer: the load generator measures them, or says what was wrong."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from runtime.errors import ConfigError
from services.bench import report
from services.bench.client import BenchTarget
from services.bench.records import RequestRecord, Targets
from services.bench.run import choose_model, run_workload
from services.bench.workload import Arrivals, Lengths, Workload
from services.cli.app import app

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
UNTIL_CLOSED = b"HTTP/1.0 200 OK\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(piece: str) -> bytes:
    return event(choices=[{"text": piece}])


def delta(**fields: object) -> bytes:
    return event(choices=[{"delta": fields}])


def usage(**fields: object) -> bytes:
    return event(choices=[], usage=fields)


def chunked(body: bytes, size: int = 1 << 20) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])


@asynccontextmanager
async def server(
    answer: bytes, *, closes: bool = False, then: bytes = b"", tls: ssl.SSLContext | None = None
) -> AsyncIterator[BenchTarget]:
    """Answers every request with these bytes, and sends `then` afterwards, unasked."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length or 0))
            except asyncio.IncompleteReadError:
                return
            writer.write(answer)
            await writer.drain()
            if then:
                await asyncio.sleep(0.02)
                writer.write(then)
            if closes:
                writer.close()
                return

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield BenchTarget.parse(
            f"http{'s' if tls else ''}://127.0.0.1:{listener.sockets[0].getsockname()[1]}", ""
        )
    finally:
        listener.close()


async def measure(target: BenchTarget, arrivals: Arrivals | None = None) -> list[RequestRecord]:
    workload = Workload(
        num_requests=2,
        arrivals=arrivals or Arrivals(),
        input_tokens=Lengths.parse("3"),
        output_tokens=Lengths.parse("2"),
    )
    records, _ = await run_workload(target, workload, "m", on_progress=lambda _: None)
    return records


TWO = text("a") + text("é€😀")
MEASURED = {
    "lines that end with CRLF": chunked((TWO + DONE).replace(b"\n", b"\r\n")),
    "every byte on its own": chunked((TWO + DONE).replace(b"\n", b"\r\n"), 1),
    "no space": chunked((TWO + DONE).replace(b"data: ", b"data:")),
    "other spaces in JSON": chunked(
        (TWO + event(choices=[])).replace(b":", b" :  ").replace(b"data :", b"data:") + DONE
    ),
    "comments and other fields": chunked(
        b": hi\n\n: x\n" + text("a") + b"id: 3\nevent: m\n" + text("b") + DONE
    ),
    "the last blank line is missing": chunked(TWO + DONE[:-2]),
    "opening role": chunked(
        delta(role="assistant", content="") + delta(content="a") + delta(content="b") + DONE
    ),
    "thoughts": chunked(
        delta(reasoning_content="x", content=None) + delta(reasoning="y", content=None) + DONE
    ),
    "usage without numbers": chunked(
        TWO + usage(prompt_tokens=None, completion_tokens="?", prompt_tokens_details=7) + DONE
    ),
    "usage below zero": chunked(TWO + usage(prompt_tokens=-5, completion_tokens=-1) + DONE),
}


@pytest.mark.parametrize("name", MEASURED)
async def test_streams_of_every_form_are_measured(name: str) -> None:
    async with server(MEASURED[name]) as target:
        for record in await measure(target):
            assert (record.error, len(record.chunk_times_s), record.completion_tokens) == ("", 2, 2)
            assert record.prompt_tokens == 3


async def test_a_body_may_end_with_the_connection_when_it_is_whole() -> None:
    async with server(UNTIL_CLOSED + TWO + DONE, closes=True) as target:
        assert all(record.ok for record in await measure(target))
    async with server(UNTIL_CLOSED + TWO, closes=True) as target:
        assert all("closed the connection" in record.error for record in await measure(target))
    async with server(b"HTTP/1.1 503 Busy\r\n\r\noverloaded", closes=True) as target:
        assert [(record.status, record.error) for record in await measure(target)] == [
            (503, "overloaded")
        ] * 2


async def test_a_server_that_hangs_is_left_after_the_limit() -> None:
    """Between two events as well as before the first; its connection is closed, and others go on."""
    opened: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)
        if len(opened) == 1:
            writer.write(chunked(text("a"))[:-5])
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    target = BenchTarget.parse(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", "")
    workload = Workload(
        num_requests=2, arrivals=Arrivals(), input_tokens=Lengths.parse("3"), output_tokens=Lengths.parse("2")
    )
    try:
        records, _ = await run_workload(target, workload, "m", limit_s=0.2, on_progress=lambda _: None)
    finally:
        listener.close()
    assert [record.error for record in records] == ["not ended after 0.2 s (--request-limit)"] * 2
    assert sorted(len(record.chunk_times_s) for record in records) == [0, 1]
    for writer in opened:
        await writer.wait_closed()


FAILED = {
    "boom": chunked(text("a") + b"event: error\n" + event(error={"message": "boom"}) + DONE),
    "boom early": chunked(text("a") + event(error={"message": "boom early"}) + TWO * 4 + DONE),
    "without [DONE]": chunked(TWO),
    "no output": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    "[/oops]": b"HTTP/1.1 500 Oops\r\ncontent-length: 7\r\n\r\n[/oops]",
    "not HTTP": b"hello\r\n\r\n",
}


@pytest.mark.parametrize("reason", FAILED)
async def test_streams_that_are_not_whole_are_failures_with_their_reason(reason: str) -> None:
    async with server(FAILED[reason]) as target:
        records = await measure(target)
    assert all(reason in record.error for record in records), records
    # Nothing that a server says is taken for markup.
    result = report.make_result(
        label="[/a]", url="u", model="[/m]", workload=Workload(
            num_requests=2, arrivals=Arrivals(), input_tokens=Lengths("fixed", 3),
            output_tokens=Lengths("fixed", 2),
        ), targets=Targets(), records=records, duration_s=1.0,
    )  # fmt: skip
    console = Console(record=True, width=200)
    report.show(result, console)
    report.show_comparison(result, result, console)
    assert reason in console.export_text()


async def test_what_comes_unasked_on_an_idle_connection_is_no_answer() -> None:
    late = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n"
    async with server(chunked(TWO + DONE), then=late) as target:
        records = await measure(target, Arrivals(rate=5))
        assert [record.status for record in records] == [200, 200]


async def test_models_may_be_listed_in_chunks_or_not_at_all() -> None:
    listed = json.dumps({"data": [{"id": "one"}, {"id": "two"}]}).encode()
    # The connection stays open, as a server may keep it.
    async with server(chunked(listed, 7)) as target:
        assert await choose_model(target, "") == "one"
    async with server(chunked(b'{"data":[]}')) as target:
        with pytest.raises(ConfigError, match="lists no model"):
            await choose_model(target, "")
    async with server(b'HTTP/1.1 401 No\r\ncontent-length: 12\r\n\r\n{"error":{}}') as target:
        with pytest.raises(ConfigError, match="HTTP 401; check"):
            await choose_model(target, "")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--url", "http://127.0.0.1:99999"], "expected http://host:port"),
        (["--url", "http://127.0.0.1:9", "--json", "/proc/nowhere/x.json"], "--json"),
        (["--url", "http://[::1"], "expected http://host:port"),
        (["--url", "http://127.0.0.1:9/a b"], "expected http://host:port"),
        (["--url", "http://me:secret@127.0.0.1:9"], "with --key"),
        (["--url", "http://127.0.0.1:9/v1?version=2"], "queries"),
        (["--url", "http://127.0.0.1:9", "--key", "a\nhost: b"], "API key: expected visible ASCII"),
        (["--url", "http://127.0.0.1:9", "--temperature", "inf"], "--temperature"),
        (["--url", "http://127.0.0.1:9", "--shared-prefix", "100000000000"], "--shared-prefix"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_measured(options: list[str], named: str) -> None:
    outcome = CliRunner().invoke(app, ["bench", "run", *options])
    said = " ".join(outcome.output.split())
    assert (outcome.exit_code, named in said) == (2, True), said


def hears_ctrl_c() -> None:
    """What a shell starts with nohup or in the background ignores SIGINT, and what that starts does, too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


async def bench(*options: str) -> asyncio.subprocess.Process:
    """`millrace bench run`, as started from a terminal."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "bench", "run", *options),
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=hears_ctrl_c,
    )


async def test_an_interrupted_run_keeps_what_it_measured(tmp_path: Path) -> None:
    answered = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answered.is_set():
            return
        await reader.readuntil(b"\r\n\r\n")
        writer.write(chunked(TWO + DONE))
        await writer.drain()
        await reader.readuntil(b"\r\n\r\n")
        answered.set()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    file = tmp_path / "result.json"
    options = ("--url", url, "--model", "m", "--concurrency", "1", "--warmup", "0", "--json", str(file))
    process = await bench(*options)
    await answered.wait()
    assert not file.exists()
    process.send_signal(signal.SIGINT)
    output, _ = await process.communicate()
    listener.close()
    assert process.returncode == 130
    assert b"interrupted after 1 of 64 requests" in output
    assert report.read(file).total.completion_tokens == 2


async def test_ctrl_c_ends_a_run_whose_server_does_not_answer() -> None:
    """Neither when asked for its models nor later; waiting for it would take half a minute."""
    asked = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    for options in ((), ("--model", "m"), ("--model", "m", "--warmup", "0")):
        asked.clear()
        process = await bench("--url", url, *options)
        await asked.wait()
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 20) == 130
    listener.close()


OPENSSL = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key -out crt -subj /CN=localhost -days 2"


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A folder with `crt` and `key` of 127.0.0.1, by no known authority."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    named = [*OPENSSL.split(), "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(named, cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


async def test_a_certificate_that_nobody_vouches_for_is_named_with_the_remedy(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "crt", certificate / "key")
    async with server(chunked(b'{"data":[{"id":"one"}]}'), tls=context) as target:
        with pytest.raises(ConfigError, match="authority with the environment variable SSL_CERT_FILE"):
            await choose_model(target, "")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "crt"))
        assert await choose_model(target, "") == "one"
    async with server(chunked(TWO + DONE), tls=context) as target:
        assert all(record.ok for record in await measure(target))


def test_a_file_that_is_no_text_is_no_result(tmp_path: Path) -> None:
    path = tmp_path / "[x].json"
    path.write_bytes(b'{"label":"\xff"}')
    outcome = CliRunner().invoke(app, ["bench", "compare", str(path), str(path)])
    assert outcome.exit_code == 2
    # Lines are broken where the folder's name puts their end.
    assert "[x].jsonisnotaresult" in "".join(outcome.output.split())
