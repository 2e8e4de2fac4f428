"""OpenVINO GenAI's continuous batching behind a thin HTTP server."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.environments import environment, made_whole
from benchmarks.peers.levels import held_variables
from benchmarks.peers.servers import Launch

VERSION = "2026.4.0"
KV_GIB = 4
# Options of its converter; groups of int4 are as large as ours.
FORMATS = {
    "fp16": ("--weight-format", "fp16"),
    "int8": ("--weight-format", "int8"),
    "int4": ("--weight-format", "int4", "--group-size", "64", "--ratio", "1.0"),
}


def prepare(folder: Path, checkpoint: Path, weights: str = "fp16") -> Callable[[int], Launch]:
    """Installs it and converts the checkpoint to one of `FORMATS`; the way to start it."""
    packages = (
        f"openvino-genai~={VERSION}",
        "openvino-tokenizers",
        "optimum-intel[openvino]",
        "starlette",
        "uvicorn",
    )
    home = environment(folder, "openvino", packages)
    model = folder / f"{checkpoint.name}-openvino{'' if weights == 'fp16' else f'-{weights}'}"
    if not (model / "openvino_model.xml").exists():
        export = (str(home / "bin/optimum-cli"), "export", "openvino", "--model", str(checkpoint))
        shutil.rmtree(model, ignore_errors=True)
        with made_whole(model) as target:
            options = ("--task", "text-generation-with-past", *FORMATS[weights], str(target))
            subprocess.run([*export, *options], check=True)
    server = Path(__file__).with_name("openvino_server.py")

    def launch(port: int) -> Launch:
        return Launch(
            # -P: this module's own name must not hide the package.
            command=(str(home / "bin/python"), "-P", str(server), str(model), str(port), str(KV_GIB)),
            variables={"HF_HUB_OFFLINE": "1", **held_variables()},
        )

    return launch
