"""Servers that are measured in turn: one that fails is left out, and takes no figures of others with it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import psutil
import pytest
import transformers

from benchmarks.peers import checkpoints
from benchmarks.peers.__main__ import measure_in_turn
from benchmarks.peers.checkpoints import SHAPES, make_checkpoint
from benchmarks.peers.loads import Load
from benchmarks.peers.roofline import Machine
from benchmarks.peers.servers import Launch, Server, ServerFailed, serve
from benchmarks.peers.tables import Measured, Recorded, table

LOADS = {str(size): Load(concurrency=size, num_requests=size, input_tokens=3) for size in (1, 8)}
# Answers so many requests with two tokens, and ends at the next one.
SERVER = """
import os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
left = [int(sys.argv[2])]
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(b'{"data":[{"id":"m"}]}')
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        if not left[0]:
            os._exit(1)
        left[0] -= 1
        self.answer(b'data: {"choices":[{"text":"a"}]}\\n\\n' * 2 + b"data: [DONE]\\n\\n")
    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
ThreadingHTTPServer.request_queue_size = 64
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def answering(name: str, folder: Path, num_requests: int) -> Callable[[], AbstractContextManager[Server]]:
    command = (sys.executable, "-c", SERVER)

    def launch(port: int) -> Launch:
        return Launch(command=(*command, str(port), str(num_requests)), variables={})

    return lambda: serve(name, launch, folder / f"{name}.log")


def not_to_be_had() -> AbstractContextManager[Server]:
    raise subprocess.CalledProcessError(3, ["/somewhere/bin/python", "-m", "pip"])


@pytest.fixture
def measured(tmp_path: Path) -> Measured:
    def ends_at_once(port: int) -> Launch:
        return Launch(command=(sys.executable, "-c", "raise SystemExit(1)"), variables={})

    found = Measured(runs=[], start_s={}, rss_bytes={})
    servers = {
        "absent": not_to_be_had,
        "steady": answering("steady", tmp_path, 1000),
        "broken": lambda: serve("broken", ends_at_once, tmp_path / "broken.log"),
        # A warm-up and a request of either round of the first load.
        "mortal": answering("mortal", tmp_path, 4),
    }
    measure_in_turn(servers, LOADS, 2, found)
    return found


def test_others_are_measured_to_the_end(measured: Measured) -> None:
    assert [(run.server, run.load) for run in measured.runs] == [
        *[("steady", "1"), ("mortal", "1"), ("mortal", "1"), ("steady", "1")],
        *([("steady", "8")] * 2),
    ]
    assert list(measured.left_out) == ["absent", "broken", "mortal"]
    assert measured.left_out["absent"] == "python ended with status 3 while it was installed"
    assert "did not start" in measured.left_out["broken"]
    assert list(measured.rss_bytes) == ["steady"]


def test_what_a_server_leaves_when_it_ends_by_itself_is_ended(tmp_path: Path) -> None:
    left = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid, flush=True)"

    def launch(port: int) -> Launch:
        return Launch(command=(sys.executable, "-c", left), variables={})

    with pytest.raises(ServerFailed, match="did not start"), serve("leaving", launch, tmp_path / "log"):
        pass
    child = int((tmp_path / "log").read_text())
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)


def test_what_was_interrupted_is_not_taken_for_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["llama-40m"] | {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    monkeypatch.setitem(SHAPES, "llama-40m", shape)
    monkeypatch.setattr(checkpoints, "_texts", lambda: iter(["one text"]))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as once:
        once.setattr(transformers.PreTrainedModel, "save_pretrained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make_checkpoint("llama-40m", tmp_path)
    assert not (tmp_path / "llama-40m").exists()
    made = make_checkpoint("llama-40m", tmp_path)
    assert {"model.safetensors", "tokenizer.json", "config.json"} <= {path.name for path in made.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["llama-40m"]
    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", interrupted)
    assert make_checkpoint("llama-40m", tmp_path) == made


def test_the_table_says_who_is_missing_and_who_failed() -> None:
    raw = {"server": "vllm", "load": "8", "num_failed": 3, "output_tokens_per_s": 5.0}
    times = dict.fromkeys(("ttft_mean_ms", "ttft_p99_ms", "tpot_mean_ms", "itl_p99_ms"), 1.0)
    record = {"machine": {}, "checkpoint": "qwen3-0.6b", "runs": [raw | times], "start_s": {"vllm": 1.0}}
    found = msgspec.convert(
        record | {"rss_bytes": {}, "left_out": {"vllm": "vllm has ended", "openvino": "python ended"}},
        Recorded,
    )
    measured = Measured(runs=found.runs, start_s=found.start_s, rss_bytes={}, left_out=found.left_out)
    rates = Machine(read_bytes_per_s=1e10, bfloat16_flops_per_s=1e12, int8_ops_per_s=1e12)
    lines = table(measured, rates, found.checkpoint)
    assert any("| 8 | vllm | 5.0 (3 requests failed) |" in line for line in lines)
    assert lines[-2:] == ["- vllm left out: vllm has ended", "- openvino left out: python ended"]
