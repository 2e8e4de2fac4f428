"""One run: the working folder, the child that quantizes, and the result that appears when it is whole."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import msgspec

from checkpoint.files import is_gguf, read_json
from engine.model.checkpoint import read_headers
from engine.model.weight_memory import NEVER_QUANTIZED
from engine.quantization.scheme import GROUP_SIZES, OLDER_FILES
from runtime.errors import ConfigError
from services.quantize import environment, kept
from services.quantize.calibration import CalibrationSet
from services.quantize.choices import MethodName, SchemeName, config_group
from services.quantize.dense import check_dense, write_dense
from services.supervisor.process import die_with_parent

_SCRIPT = Path(__file__).with_name("inside") / "compress.py"
MXFP4_GROUP = 32
# Files beside the weights that the result has as they are.
_COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
    *("generation_config.json", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE"),
)


class QuantizeJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for, checked."""

    # As it was named, and what was found by that name.
    model: str
    checkpoint: Path
    scheme: SchemeName
    method: MethodName
    group_size: int
    out: Path
    calibration: CalibrationSet | None = None
    max_tokens: int = 512
    # Of weights in memory; 0 is as many as there are.
    memory_bytes: int = 0
    threads: int = 0


class LayerProgress(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="layer"):
    """A layer is done."""

    done: int
    total: int
    # It was done by a run before.
    kept: bool
    seconds_left: float | None


class _Loaded(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="loaded"):
    layers: int


class _Offloaded(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="offloaded"):
    num_bytes: int


class _Texts(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="texts"):
    texts: int
    tokens: int


class _Saving(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="saving"):
    pass


class _Failed(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="error"):
    message: str


class _Done(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="done"):
    peak_bytes: int
    seconds: float
    versions: dict[str, str]


_Event = LayerProgress | _Loaded | _Offloaded | _Texts | _Saving | _Failed | _Done
Tell = Callable[[str], None]
Advance = Callable[[LayerProgress], None]


class Quantized(msgspec.Struct, frozen=True, kw_only=True):
    """A result and where it came from."""

    job: QuantizeJob
    key: str
    model_digest: str
    versions: dict[str, str]
    # Of the child: its largest resident set, and how long this run of it took.
    peak_bytes: int
    # Weights that lay on disk.
    offloaded_bytes: int
    seconds: float
    layers: int
    kept_layers: int
    texts: int
    tokens: int
    bytes_before: int
    bytes_after: int


def check_checkpoint(checkpoint: Path) -> None:
    """Raises ConfigError for what cannot be quantized."""
    if is_gguf(checkpoint):
        check_dense(checkpoint)
        return
    settings = read_json(checkpoint / "config.json") or {}
    if settings.get("quantization_config") or any((checkpoint / name).is_file() for name in OLDER_FILES):
        raise ConfigError(
            f"{checkpoint} is quantized already, and each rounding adds to the one before; give the dense "
            "original"
        )


def choose_group(checkpoint: Path, scheme: SchemeName, wanted: int | None) -> int:
    """Inputs that share a scale, for schemes that have groups, else 0: the largest size that divides the
    inputs of every layer. Raises ConfigError that names a layer which does not divide.
    """
    if scheme not in ("int4", "mxfp4"):
        if wanted is not None:
            raise ConfigError(f"--group-size is of --scheme int4; {scheme} has no groups to choose")
        return 0
    headers = read_headers(checkpoint)
    inputs = {
        name: header.shape[1]
        for name, header in headers.items()
        if len(header.shape) == 2
        and ".layers." in name
        and name.endswith(".weight")
        and not any(part in name for part in NEVER_QUANTIZED)
    }
    if scheme == "mxfp4" and wanted not in (None, MXFP4_GROUP):
        raise ConfigError(f"--group-size {wanted}: the groups of mxfp4 are of {MXFP4_GROUP} inputs")
    sizes = (MXFP4_GROUP,) if scheme == "mxfp4" else (wanted,) if wanted else GROUP_SIZES
    for size in sizes:
        if all(count % size == 0 for count in inputs.values()):
            return size
    name, count = next((name, count) for name, count in inputs.items() if count % sizes[-1])
    raise ConfigError(
        f"{checkpoint}: {name} has {count} inputs, which do not fall into groups of "
        f"{' or '.join(map(str, sizes))}; take --scheme int8, which has none"
    )


def key_of(job: QuantizeJob, digest: str) -> str:
    """The name of everything that decides the result's numbers."""
    return kept.run_key(
        {
            "model": digest,
            "scheme": job.scheme,
            "method": job.method,
            "group_size": job.group_size,
            "calibration": job.calibration.digest if job.calibration else "",
            "max_tokens": job.max_tokens if job.calibration else 0,
            "packages": environment.PACKAGES,
        }
    )


def compress(
    job: QuantizeJob, write_card: Callable[[Quantized, Path], None], tell: Tell, advance: Advance
) -> Quantized:
    """Makes the folder `job.out`, with the card that `write_card` writes into it. Raises ConfigError; the
    same call goes on where it was.
    """
    digest = kept.model_digest(job.checkpoint)
    key = key_of(job, digest)
    python = environment.ensure_quantizer(tell)
    with kept.working_folder(job.out, key) as folder:
        source = job.checkpoint
        if is_gguf(source):
            source = folder / "dense"
            if not source.is_dir():
                tell("turning the GGUF file dense")
                write_dense(job.checkpoint, source)
        result = folder / "result"
        shutil.rmtree(result, ignore_errors=True)
        found = _Child(python, folder, tell, advance).run(_described(job, source, folder))
        quantized = Quantized(
            job=job,
            key=key,
            model_digest=digest,
            versions=found.done.versions,
            peak_bytes=found.done.peak_bytes,
            offloaded_bytes=found.offloaded_bytes,
            seconds=found.done.seconds,
            layers=found.layers,
            kept_layers=found.kept_layers,
            texts=found.texts.texts,
            tokens=found.texts.tokens,
            bytes_before=_weight_bytes(job.checkpoint),
            bytes_after=_weight_bytes(result),
        )
        for name in _COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, result / name)
        (result / "recipe.yaml").unlink(missing_ok=True)
        write_card(quantized, result)
        kept.publish(folder, result, job.out)
    return quantized


def _described(job: QuantizeJob, source: Path, folder: Path) -> dict[str, Any]:
    """The job as the child reads it."""
    texts = folder / "calibration.jsonl"
    if job.calibration is not None:
        texts.write_bytes(job.calibration.encoded())
    layers = folder / "layers"
    layers.mkdir(exist_ok=True)
    return {
        "model": str(source),
        "out": str(folder / "result"),
        "layers": str(layers),
        "offload": str(folder / "offload"),
        "scheme": job.scheme,
        "method": job.method,
        "group": config_group(job.scheme, job.method, job.group_size),
        "calibration": str(texts) if job.calibration else "",
        "calibration_name": job.calibration.name if job.calibration else "",
        "max_tokens": job.max_tokens,
        "memory_bytes": job.memory_bytes,
        "threads": job.threads,
    }


class _Child:
    """The process that quantizes, and what it said."""

    def __init__(self, python: Path, folder: Path, tell: Tell, advance: Advance) -> None:
        self._python, self._folder, self._tell, self._advance = python, folder, tell, advance
        self.layers = self.kept_layers = self.offloaded_bytes = 0
        self.texts = _Texts(texts=0, tokens=0)
        self._done: _Done | None = None
        self._failed = ""

    @property
    def done(self) -> _Done:
        assert self._done is not None, "run returned"
        return self._done

    def run(self, job: dict[str, Any]) -> _Child:
        described, log = self._folder / "job.json", self._folder / "log.txt"
        described.write_text(json.dumps(job), encoding="utf-8")
        self._tell(f"loading {job['model']}")
        # Libraries print where they like; events have a pipe of their own.
        begin, end = os.pipe()
        with log.open("w", encoding="utf-8") as errors:
            process = subprocess.Popen(
                [self._python, "-P", _SCRIPT, described, str(end)],
                stdout=errors,
                stderr=errors,
                env=environment.child_variables(),
                pass_fds=(end,),
                # A child that nobody waits for would go on for hours.
                preexec_fn=die_with_parent(signal.SIGKILL),  # noqa: PLW1509
            )
            os.close(end)
            try:
                with os.fdopen(begin, "rb") as events:
                    self._follow(events)
                code = process.wait()
            finally:
                process.kill()
                process.wait()
        if self._failed or code or self._done is None:
            raise ConfigError(self._reason(code, log))
        return self

    def _follow(self, lines: IO[bytes]) -> None:
        for line in lines:
            match msgspec.json.decode(line, type=_Event):
                case LayerProgress() as layer:
                    self.kept_layers += layer.kept
                    self._advance(layer)
                case _Loaded(layers=layers):
                    self.layers = layers
                case _Offloaded(num_bytes=num_bytes):
                    self.offloaded_bytes = num_bytes
                case _Texts() as texts:
                    self.texts = texts
                case _Saving():
                    self._tell("writing the result")
                case _Failed(message=message):
                    self._failed = message
                case _Done() as done:
                    self._done = done

    def _reason(self, code: int, log: Path) -> str:
        more = f"{log} has the rest; the same command goes on after the layers that are done"
        if self._failed:
            return f"llm-compressor ended: {self._failed}; {more}"
        if code == -signal.SIGKILL:
            return (
                "llm-compressor was killed, probably because memory ran out: give fewer --samples, shorter "
                f"--max-tokens, or --memory-gib; {more}"
            )
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"llm-compressor ended with {code}: {lines[-1] if lines else 'it said nothing'}; {more}"


def _weight_bytes(checkpoint: Path) -> int:
    files = [checkpoint] if is_gguf(checkpoint) else list(checkpoint.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)
