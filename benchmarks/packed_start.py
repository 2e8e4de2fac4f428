"""Seconds until an engine's core is ready: when it packs its weights, and when it finds them packed.

`python -m benchmarks.packed_start --model DIR [--quantize off int8 int4] [--rounds 3] [--json ...]`

Each round is a core process of its own, from its start until it says that it is ready; the first one of a
form packs and keeps (the baseline), and the others read. `weights s` is the part of it that reads, converts
and packs, or reads what is packed. All after the first have the files in the system's cache of pages, as a
model that is asked for again usually has.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.engine.report import options, publish
from checkpoint.files import find
from contract.frames import FrameBuffer
from engine.config import EngineConfig
from engine.core import messages
from engine.core.messages import encode
from engine.model.kept_files import PackedFolder
from runtime.config import ModelConfig

_LIMIT_S = 600.0
# Stages that bring weights into memory.
_WEIGHTS = ("read packed weights", "compare checkpoint with packed weights", "load weights")


def _ready(start: messages.Start, is_kept: Path) -> tuple[float, dict[str, float]]:
    """Seconds until the core is ready, and of each stage; it is stopped once something is kept."""
    ours, theirs = socket.socketpair()
    begun_s = time.perf_counter()
    with ours, theirs:
        arguments = ("-m", "engine.core", "--fd", str(theirs.fileno()), "--log-level", "warning")
        core = subprocess.Popen([sys.executable, *arguments], pass_fds=(theirs.fileno(),))
        try:
            ours.settimeout(_LIMIT_S)
            ours.sendall(encode(start))
            stages = _stages(ours)
            ready_s = time.perf_counter() - begun_s
            ends_s = time.monotonic() + _LIMIT_S
            while not PackedFolder(is_kept, 0).all():
                if time.monotonic() > ends_s:
                    raise SystemExit(f"nothing is kept in {is_kept}")
                time.sleep(0.1)
        finally:
            core.kill()
            core.wait()
    return ready_s, stages


def _stages(connection: socket.socket) -> dict[str, float]:
    buffer, decoder = FrameBuffer(), msgspec.msgpack.Decoder(messages.Report)
    while data := connection.recv(1 << 20):
        for payload in buffer.feed(data):
            report = decoder.decode(payload)
            if isinstance(report, messages.CoreRefused):
                raise SystemExit(report.message)
            if isinstance(report, messages.Ready):
                return dict(report.stages_s)
    raise SystemExit("the core ended before it was ready")


def _rows(arguments: argparse.Namespace, quantize: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        config = msgspec.convert(
            {
                "native": "required",
                "quantize": quantize,
                "max_model_len": arguments.max_model_len,
                "cache": {"kv_cache_bytes": 512 << 20},
                "packed_weights": {"path": folder, "min_bytes": 0},
            },
            EngineConfig,
        )
        start = messages.Start(config=config, model=ModelConfig(path=str(find(arguments.model).resolve())))
        timed = [_ready(start, Path(folder)) for _ in range(arguments.rounds + 1)]
        kept = sum(each.num_bytes for each in PackedFolder(Path(folder), 0).all())
    rows = []
    for what, found in (("packs", timed[:1]), ("reads", timed[1:])):
        stages = [{**each} for _, each in found]
        rows.append(
            {
                "weights": quantize,
                "start": what,
                "ready s": statistics.median(seconds for seconds, _ in found),
                "weights s": statistics.median(
                    sum(each.get(name, 0.0) for name in _WEIGHTS) for each in stages
                ),
                "kept MB": kept / 1e6,
            }
        )
    return rows


def main() -> None:
    """Prints the table."""
    parser = options(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--quantize", nargs="+", default=["off", "int8", "int4"])
    parser.add_argument("--rounds", type=int, default=3, help="starts that read")
    parser.add_argument("--max-model-len", type=int, default=4096)
    arguments = parser.parse_args()
    rows = [row for quantize in arguments.quantize for row in _rows(arguments, quantize)]
    publish(f"Start of {Path(arguments.model).name}, packed or read", rows, arguments.json)


if __name__ == "__main__":
    main()
