"""llm-compressor's own environment: where it is, and how it is made, as vLLM's is.

It pins a transformers of its own, so nothing of it is installed beside the suite. `python -m
services.quantize.environment` makes it ahead of the first `millrace quantize`, which does so otherwise.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from engine.vllm_core.install import home_of, inherited, install_torch, make_environment, mark_of, pip
from runtime.errors import ConfigError

# Versions that are installed; tests run with the same.
VERSION = "0.14.0.1"
PACKAGES = (
    f"llmcompressor=={VERSION}",
    "compressed-tensors==0.19.0",
    "transformers==5.17.0",
    "accelerate==1.15.0",
    "bitsandbytes==0.50.2",
)
_VARIABLE = "MILLRACE_QUANTIZE_HOME"
# These are about the suite's own environment.
_OURS = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV")
_ASK = "from importlib import metadata; print(metadata.version('llmcompressor'))"


def quantizer_home(environ: Mapping[str, str] | None = None) -> Path:
    """Where it is: MILLRACE_QUANTIZE_HOME, or the user's data directory. Raises ConfigError."""
    return home_of("llm-compressor", _VARIABLE, f"llmcompressor-{VERSION}", environ)


def child_variables() -> dict[str, str]:
    """Variables of a process that runs there."""
    kept = {name: value for name, value in inherited().items() if name not in _OURS}
    own = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    return {**kept, **own}


def quantizer_python(folder: Path) -> Path | None:
    """The interpreter that has it, or None where nothing was installed, or not to the end. Raises ConfigError
    where the folder holds something else.
    """
    if not folder.exists() or mark_of(folder).exists():
        return None
    python = folder / "bin" / "python"
    found = ""
    if python.is_file():
        # -P: what lies in the working directory is not installed.
        asked = subprocess.run([python, "-P", "-c", _ASK], capture_output=True, text=True, check=False)
        found = asked.stdout.strip()
    if not found:
        raise ConfigError(
            f"{folder}: it is there, and no environment that has llm-compressor; remove it, or name another "
            f"place with {_VARIABLE}"
        )
    return python


def ensure_quantizer(tell: Callable[[str], None]) -> Path:
    """The interpreter, installed where it is not there yet: that takes minutes and a gigabyte. Raises
    ConfigError with the command that failed, and what else would do.
    """
    folder = quantizer_home()
    python = quantizer_python(folder)
    if python is not None:
        return python
    tell(f"installing llm-compressor {VERSION} in {folder}, once")
    try:
        make_environment(folder, _install)
    except ConfigError as error:
        raise ConfigError(
            f"llm-compressor cannot be installed in {folder}: {error}. Where PyPI is not reached, set "
            "PIP_INDEX_URL to a mirror, or make an environment elsewhere with `pip install "
            f"{' '.join(PACKAGES)}` and name it with {_VARIABLE}"
        ) from error
    return folder / "bin" / "python"


def _install(python: Path) -> None:
    # torch first: packages that ask for it find it there, in the build that was meant.
    if shutil.which("nvidia-smi"):
        pip(python, "install", "torch")
        kept = "torch"
    else:
        kept = install_torch(python)
    pip(python, "install", kept, *PACKAGES)


def main() -> int:
    """Makes the environment; the exit code."""
    try:
        print(ensure_quantizer(print))
    except (ConfigError, OSError) as error:
        print(f"millrace: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run it again to install all of it", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
