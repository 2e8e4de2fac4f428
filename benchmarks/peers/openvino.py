"""OpenVINO GenAI's continuous batching behind a thin HTTP server."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.environments import environment, made_whole
from benchmarks.peers.servers import Launch

VERSION = "2026.4.0"
KV_GIB = 4


def prepare(folder: Path, checkpoint: Path) -> Callable[[int], Launch]:
    """Installs it and converts the checkpoint; the way to start it."""
    packages = (
        f"openvino-genai~={VERSION}",
        "openvino-tokenizers",
        "optimum-intel[openvino]",
        "starlette",
        "uvicorn",
    )
    home = environment(folder, "openvino", packages)
    model = folder / f"{checkpoint.name}-openvino"
    if not (model / "openvino_model.xml").exists():
        export = (str(home / "bin/optimum-cli"), "export", "openvino", "--model", str(checkpoint))
        shutil.rmtree(model, ignore_errors=True)
        with made_whole(model) as target:
            options = ("--task", "text-generation-with-past", "--weight-format", "fp16", str(target))
            subprocess.run([*export, *options], check=True)
    server = Path(__file__).with_name("openvino_server.py")

    def launch(port: int) -> Launch:
        return Launch(
            # -P: this module's own name must not hide the package.
            command=(str(home / "bin/python"), "-P", str(server), str(model), str(port), str(KV_GIB)),
            variables={"HF_HUB_OFFLINE": "1"},
        )

    return launch
