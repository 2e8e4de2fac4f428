"""vLLM's CPU build."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.peers.levels import held_variables
from benchmarks.peers.servers import Launch
from engine.vllm_core import install as ours

KV_GIB = 4
# Its bfloat16 does not become ready where a processor has no AVX-512.
DTYPES = ("bfloat16", "float32")


def install(folder: Path) -> Path:
    """The environment that holds it: the folder's own, else what `millrace engine install vllm` made, else it
    is made in the folder.
    """
    own, users = folder / "vllm", ours.home()
    return ours.install(users if users.exists() and not own.exists() else own, cpu=True).parent.parent


def prepare(
    folder: Path,
    checkpoint: Path,
    more: Sequence[str] = (),
    *,
    kv_gib: int = KV_GIB,
    dtype: str = DTYPES[0],
) -> Callable[[int], Launch]:
    """Installs it; the way to start it, with `more` options."""
    home = install(folder)
    last_core = (os.cpu_count() or 1) - 1

    def launch(port: int) -> Launch:
        return Launch(
            command=(
                *(str(home / "bin/vllm"), "serve", str(checkpoint), "--port", str(port)),
                *("--dtype", dtype, "--max-model-len", "4096", "--max-num-seqs", "64"),
                *more,
            ),
            variables={
                # "auto" keeps a core free, and loses two fifths on two cores.
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{last_core}",
                "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "PATH": f"{home / 'bin'}:/usr/local/bin:/usr/bin:/bin",
                **held_variables(),
            },
        )

    return launch
