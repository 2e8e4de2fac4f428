"""Command and variables of a core under vLLM's interpreter."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from contract import frames, prefix, thinking
from engine.config import EngineConfig, num_threads
from engine.vllm_core.environment import find_python
from engine.vllm_core.install import inherited
from runtime.resources import num_cores

# The name of `inside` there, and of the distribution by which vLLM finds its plugin.
_PACKAGE = "millrace_vllm"
_INSIDE = Path(__file__).parent / "inside"
# These are about the environment of the front.
_OURS = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "OMP_NUM_THREADS")


def lay_out(folder: Path) -> None:
    """Lays the code out in a folder so that vLLM's processes can import it and find the plugin."""
    (folder / _PACKAGE).symlink_to(_INSIDE, target_is_directory=True)
    # The only files of the suite that it imports; they need the standard library alone.
    (folder / "contract").mkdir()
    for module in (frames, prefix, thinking):
        path = Path(str(module.__file__))
        (folder / "contract" / path.name).symlink_to(path)
    about = folder / f"{_PACKAGE}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_PACKAGE}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\nmillrace = {_PACKAGE}.plugin:register\n"
    )


def command(config: EngineConfig, fd: int, log_level: str) -> tuple[str, ...]:
    """The core's command line; raises ConfigError where there is no vLLM."""
    python = find_python(config.vllm)
    return (str(python), "-m", _PACKAGE, "--fd", str(fd), "--log-level", log_level)


def variables(config: EngineConfig, folder: Path, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """All variables of the core's process. What the operator has set stays."""
    python = find_python(config.vllm)
    given = inherited() if environ is None else environ
    kept = {name: value for name, value in given.items() if name not in _OURS}
    own = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        **_threads(config),
    }
    return {
        **own,
        **kept,
        **config.vllm.environment,
        "PYTHONPATH": str(folder),
        # Compilers of kernels are called by name.
        "PATH": f"{python.parent}:{kept.get('PATH', '')}",
    }


def _threads(config: EngineConfig) -> dict[str, str]:
    """Processors of each rank on a CPU. vLLM's own choice keeps one free, which costs two fifths on two."""
    vllm, cores = config.vllm, sorted(os.sched_getaffinity(0))
    ranks = vllm.tensor_parallel_size * vllm.pipeline_parallel_size * vllm.data_parallel_size
    threads = config.num_threads or num_threads()
    if ranks == 1 and threads < num_cores():
        # Several engines share the machine: the kernel decides where each runs.
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    if ranks > len(cores):
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    share = len(cores) // ranks
    parts = [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, part)) for part in parts)}
