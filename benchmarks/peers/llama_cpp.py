"""llama.cpp's own server, built from the source that llama-cpp-python carries."""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.peers.checkpoints import GGUF_FILE
from benchmarks.peers.environments import environment, made_whole
from benchmarks.peers.levels import held
from benchmarks.peers.loads import DEFAULT_LOADS, LOADS
from benchmarks.peers.servers import Launch
from kernels.native.config import forced_level

VERSION = "0.3.36"
# Tokens that each slot keeps: the longest request of the loads, and a little more.
SLOT_TOKENS = 1280
# Kinds made of bfloat16, and what llama-quantize calls them: the one with the most Q4_K is the fastest.
QUANTIZED = {"q4_K": "Q4_K_S"}
# Its converter knows tokenizers by a hash of what they do; ours is of Qwen's kind.
CONVERT = (
    "import sys; sys.path.insert(0, {source!r}); "
    "import convert_hf_to_gguf as convert; import conversion.base as base; "
    "base.TextModel.get_vocab_base_pre = lambda self, tokenizer: 'qwen2'; "
    "sys.argv = ['convert', {checkpoint!r}, '--outtype', {kind!r}, '--outfile', {target!r}]; convert.main()"
)


def prepare(folder: Path, checkpoint: Path, kind: str) -> Callable[[int], Launch]:
    """Builds the server, for the level that is forced if there is one, and converts the checkpoint to `kind`
    (bf16, q8_0, or one of `QUANTIZED`), or serves its own GGUF file ("file"); the way to start it.
    """
    home = environment(folder, "llamacpp", ("cmake", "ninja", "transformers", "sentencepiece", "gguf"))
    source = _source(folder, home)
    server = _build(source, home)
    if kind == "file":
        model = checkpoint / GGUF_FILE
    else:
        model = _converted(folder, checkpoint, "bf16" if kind in QUANTIZED else kind, source, home)
    if kind in QUANTIZED:
        model = _quantized(folder, checkpoint, kind, model, server)
    cores = str(psutil.cpu_count())
    # It reserves and clears every slot's cache at start, so more slots than the loads use would be waste.
    slots = max(LOADS[load].concurrency for load in DEFAULT_LOADS[checkpoint.name])

    def launch(port: int) -> Launch:
        return Launch(
            command=(
                *(str(server), "--model", str(model), "--port", str(port), "--parallel", str(slots)),
                *("--ctx-size", str(slots * SLOT_TOKENS), "--threads", cores, "--threads-batch", cores),
                *("--no-webui", "--batch-size", "2048", "--ubatch-size", "512"),
            ),
            variables={},
        )

    return launch


def _converted(folder: Path, checkpoint: Path, kind: str, source: Path, home: Path) -> Path:
    """The checkpoint in a type that the converter writes."""
    model = folder / f"{checkpoint.name}-{kind}.gguf"
    if not model.exists():
        with made_whole(model) as target:
            code = CONVERT.format(
                source=str(source), checkpoint=str(checkpoint), kind=kind, target=str(target)
            )
            subprocess.run([str(home / "bin/python"), "-c", code], check=True)
    return model


def _quantized(folder: Path, checkpoint: Path, kind: str, whole: Path, server: Path) -> Path:
    """The checkpoint in a type that its own tool makes of another."""
    model = folder / f"{checkpoint.name}-{kind}.gguf"
    if not model.exists():
        with made_whole(model) as target:
            tool = server.with_name("llama-quantize")
            subprocess.run([str(tool), str(whole), str(target), QUANTIZED[kind]], check=True)
    return model


def _source(folder: Path, home: Path) -> Path:
    """The unpacked source of llama.cpp."""
    source = folder / f"llama_cpp_python-{VERSION}" / "vendor/llama.cpp"
    if not source.exists():
        pip = [str(home / "bin/python"), "-m", "pip", "download", "--quiet", "--no-deps"]
        only_source = ("--no-binary", ":all:", f"llama-cpp-python=={VERSION}", "-d", str(folder))
        subprocess.run([*pip, *only_source], check=True)
        with tarfile.open(next(folder.glob(f"llama_cpp_python-{VERSION}*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
    return source


def _build(source: Path, home: Path) -> Path:
    """The path of llama-server, with llama-quantize beside it."""
    level = held()
    build = source / (f"build-{forced_level()}" if level else "build")
    server = build / "bin/llama-server"
    if not (server.exists() and server.with_name("llama-quantize").exists()):
        cmake = str(home / "bin/cmake")
        sets = ("AVX", "AVX2", "FMA", "F16C", "BMI2", *level.ggml) if level else ()
        options = (
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DGGML_NATIVE={'OFF' if level else 'ON'}",
            *(f"-DGGML_{name}=ON" for name in sets),
            "-DLLAMA_CURL=OFF",
            "-DLLAMA_BUILD_TESTS=OFF",
        )
        ninja = f"-DCMAKE_MAKE_PROGRAM={home / 'bin/ninja'}"
        configure = [cmake, "-S", str(source), "-B", str(build), "-G", "Ninja", ninja, *options]
        subprocess.run(configure, check=True)
        targets = ("--target", "llama-server", "--target", "llama-quantize")
        subprocess.run([cmake, "--build", str(build), *targets], check=True)
    return server
