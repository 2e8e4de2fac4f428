"""Memory of an engine's core while it loads a checkpoint, and when it has.

Baseline: nothing is given back (pages of the file stay mapped while they are read, the embedding is copied,
and what was freed stays with the allocator). Ours is what the engine does (engine/model/mapped_pages.py,
runtime.memory.give_back). Each is a process of its own that loads as the engine's core does, and waits until
the memory that the cache has ahead of its use is there. MiB; the peak is that of the process so far.

    python -m benchmarks.engine.load_memory --checkpoint FOLDER [--quantize w8a8] [--json OUT]
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.engine.report import publish

_CACHE_BYTES = 4 << 30
# The cache's memory is had ahead of its use within this time.
_AHEAD_S = 3.0
_FIELDS = {"resident": "VmRSS", "of it files": "RssFile", "peak": "VmHWM"}


def _now() -> dict[str, float]:
    status = Path("/proc/self/status").read_text()
    found = {
        name: re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE) for name, field in _FIELDS.items()
    }
    return {name: int(each[1]) / 1024 if each else 0.0 for name, each in found.items()}


def load(checkpoint: str, quantize: str, *, gives_back: bool) -> list[dict[str, str | float]]:
    """A row after each stage."""
    import msgspec

    from engine.config import EngineConfig
    from engine.model import mapped_pages, weights
    from engine.runner.build import build_here
    from runtime.config import ModelConfig
    from runtime.memory import give_back

    rows: list[dict[str, str | float]] = []

    def note(stage: str) -> None:
        rows.append({"memory": "ours" if gives_back else "baseline: kept", "after": stage, **_now()})

    def progress(stage: str, fraction: float) -> None:
        if fraction == 1:
            note(stage)

    if not gives_back:
        weights.LARGE_TABLE_BYTES = sys.maxsize
        mapped_pages.STRIDE_BYTES = sys.maxsize
    note("imports")
    config = {
        "dtype": "bfloat16",
        "quantize": quantize,
        "max_model_len": 4096,
        "cache": {"kv_cache_bytes": _CACHE_BYTES, "kv_dtype": "int8" if quantize == "w8a8" else "auto"},
    }
    runner, _, _ = build_here(msgspec.convert(config, EngineConfig), ModelConfig(path=checkpoint), progress)
    time.sleep(_AHEAD_S)
    gc.collect()
    if gives_back:
        give_back()
    note("ready")
    runner.close()
    return rows


def main() -> None:
    """Loads twice, in processes of their own, and prints both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--quantize", default="off", choices=("off", "int8", "w8a8", "int4"))
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--child", choices=("kept", "given"), default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        rows = load(arguments.checkpoint, arguments.quantize, gives_back=arguments.child == "given")
        print(json.dumps(rows))
        return
    rows = []
    for child in ("kept", "given"):
        command = (sys.executable, "-m", "benchmarks.engine.load_memory", "--child", child)
        given = ("--checkpoint", arguments.checkpoint, "--quantize", arguments.quantize)
        run = subprocess.run([*command, *given], stdout=subprocess.PIPE, check=True)
        rows += json.loads(run.stdout.splitlines()[-1])
    name = Path(arguments.checkpoint).name
    publish(f"{name}, quantize = {arguments.quantize}: MiB while it is loaded", rows, arguments.json)


if __name__ == "__main__":
    main()
