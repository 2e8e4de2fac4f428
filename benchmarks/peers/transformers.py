"""transformers' continuous batching behind a thin HTTP server.

Its own `transformers serve` takes prompts as text only, and refuses `ignore_eos`; what it serves with,
`ContinuousBatchingManager`, runs on a CPU, with PyTorch's attention in place of the paged kernels for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.environments import environment
from benchmarks.peers.levels import held_variables
from benchmarks.peers.servers import Launch

VERSION = "5.23.0"
KV_GIB = 4


def prepare(folder: Path, checkpoint: Path) -> Callable[[int], Launch]:
    """Installs it; the way to start it."""
    home = environment(folder, "transformers", (f"transformers=={VERSION}", "psutil", "starlette", "uvicorn"))
    server = Path(__file__).with_name("transformers_server.py")

    def launch(port: int) -> Launch:
        return Launch(
            command=(str(home / "bin/python"), "-P", str(server), str(checkpoint), str(port), str(KV_GIB)),
            variables={"HF_HUB_OFFLINE": "1", **held_variables()},
        )

    return launch
