"""Our side: the whole stack behind Envoy, as `millrace up` starts it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.servers import Server, ServerFailed, stop
from benchmarks.stack import python_of
from services.supervisor.state import read_state

START_LIMIT_S = 300.0
KV_BYTES = 4 << 30


@contextmanager
def millrace(
    name: str,
    checkpoint: Path,
    log: Path,
    settings: Mapping[str, object],
    checkout: Path | None = None,
    tables: str = "",
) -> Iterator[Server]:
    """The stack with `[engine]` keys `settings` (dotted names) and further `tables` of its configuration,
    stopped at the end; of another checkout with its `.venv`.
    """
    with tempfile.TemporaryDirectory(prefix="millrace-peers-") as folder:
        config = Path(folder) / "millrace.toml"
        engine = {
            "cache.kv_cache_bytes": KV_BYTES,
            "max_model_len": 4096,
            "scheduler.max_num_seqs": 64,
            **settings,
        }
        lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in engine.items())
        config.write_text(f"[engine]\n{lines}\n{tables}")
        up = ["-m", "services.cli", "up", "--port", "0", "--model", str(checkpoint)]
        command = [python_of(checkout), *up]
        began = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--config", str(config)],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=checkout,
                env={**os.environ, "MILLRACE_STATE_DIR": folder},
            )
        try:
            while (state := read_state(Path(folder))) is None:
                if process.poll() is not None or time.monotonic() - began > START_LIMIT_S:
                    raise ServerFailed(f"{name} did not start; its output is in {log}")
                time.sleep(0.1)
            yield Server(
                name=name,
                url=f"http://{state.address}",
                api_key=state.api_key,
                model=state.model,
                pid=process.pid,
                start_s=time.monotonic() - began,
                metrics_url=next(
                    f"http://{each.addresses['metrics']}/metrics"
                    for each in state.processes
                    if each.name == "engine-0"
                ),
            )
        finally:
            stop(process)
