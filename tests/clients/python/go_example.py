"""The example for backend services in Go: stubs from proto/, compiled with what Debian has, and run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from report import ADDRESS, ANSWER, API_KEY, ENVIRONMENT, MODEL, OUT, ROOT, works

SOURCES = OUT / "go" / "src"
PROTOS = [
    str(path.relative_to(ROOT))
    for folder in ("common", "inference")
    for path in sorted((ROOT / "proto" / "millrace" / folder / "v1").glob("*.proto"))
]
GO = {
    **os.environ,
    "PATH": f"{ENVIRONMENT / 'usr/bin'}:{os.environ['PATH']}",
    "GOROOT": str(ENVIRONMENT / "usr/lib/go-1.19"),
    # Debian's libraries lie where Go looked for them before there were modules.
    "GO111MODULE": "off",
    "GOPATH": f"{SOURCES.parent}:{ENVIRONMENT / 'usr/share/gocode'}",
    "GOCACHE": str(ENVIRONMENT / "cache"),
    "CGO_ENABLED": "0",
}


def run(*command: str, **options: object) -> str:
    """What the command printed; raises with what it complained of."""
    done = subprocess.run(command, env=GO, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr[-3000:]
    return str(done.stdout)


shutil.rmtree(SOURCES, ignore_errors=True)
shutil.copytree(ROOT / "client" / "examples" / "go", SOURCES / "example")
program = str(SOURCES.parent / "example")
with works("stubs from proto/"):
    outputs = (f"--go_out={SOURCES}", f"--go-grpc_out={SOURCES}")
    run(sys.executable, "-m", "grpc_tools.protoc", "-Iproto", *outputs, *PROTOS, cwd=ROOT)
with works("its types"):
    compiler = str(ENVIRONMENT / "usr/lib/go-1.19/bin/go")
    run(compiler, "build", "-o", program, ".", cwd=SOURCES / "example")
with works("an answer, a stop and a refusal"):
    told = run(program, ADDRESS, API_KEY, MODEL)
    refused = ("refused: INVALID_ARGUMENT: ", "at sampling.temperature")
    for part in (ANSWER, "tokens, request ", "stopped after:", *refused):
        assert part in told, told
