"""The model card of a result: what it is, what the gate says of it, and where everything came from."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from services.gate import report
from services.gate.run import Comparison
from services.gate.verdict import LayerResult
from services.quantize.choices import MethodName, SchemeName
from services.quantize.run import Quantized, QuantizeJob

_STORED = {
    "int8": "weights of 8 bits, one scale for each output",
    "w8a8": "weights of 8 bits, one scale for each output; inputs rounded to 8 bits for each token",
    "fp8": "weights in float8 (e4m3), one scale for each output; inputs rounded to float8 for each token",
    "int4": "weights of 4 bits, in groups of {group} inputs",
    "nf4": "weights in NF4 of bitsandbytes, in blocks of 64",
    "mxfp4": "weights in MXFP4, in groups of {group} inputs with powers of two for scales",
}
_METHODS: dict[MethodName, str] = {
    "rtn": "rounded to nearest",
    "awq": "scaled by what inputs are like (AWQ, arXiv 2306.00978), then rounded to nearest",
    "gptq": "rounded column by column, each error made up for by the rest (GPTQ, arXiv 2210.17323)",
    "smoothquant": "smoothed (SmoothQuant, arXiv 2211.10438), then rounded to nearest",
}
_MIB = 2**20
# What vLLM does with it: of the release that `millrace engine install vllm` installs.
_VLLM: dict[SchemeName, str] = {
    "int8": "; vLLM has no kernel for it on CPUs",
    "w8a8": ", and vLLM",
    "fp8": ", and vLLM",
    "int4": ", and vLLM",
    "nf4": "; vLLM does not",
    "mxfp4": "; vLLM has no kernel for it on CPUs",
}
NO_GATE = "Nothing was measured: the gate was left out (`--no-gate`)."
PENDING = (
    "Nothing is measured: the gate did not come to its end. `millrace gate --baseline ORIGINAL --candidate "
    "THIS` judges it."
)


def card(quantized: Quantized, quality: str) -> str:
    """The page; `quality` is its section on the gate."""
    job = quantized.job
    name = Path(job.model).name
    kind = "bitsandbytes" if job.scheme == "nf4" else "compressed-tensors"
    stored = _STORED[job.scheme].format(group=job.group_size)
    lines = [
        "---",
        f"base_model: {job.model}",
        f"tags: [quantized, {kind}, {job.scheme}, {job.method}]",
        "---",
        f"# {name}, {job.scheme} by {job.method}",
        "",
        f"{stored[0].upper()}{stored[1:]}; {_METHODS[job.method]}. It is stored as {kind} does, which "
        f"Millrace and transformers read{_VLLM[job.scheme]}.",
        "",
        "## Is it still as good?",
        "",
        quality,
        "",
        "## Where it comes from",
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in _provenance(quantized)),
        "",
        f"Made by `{command_of(job)}`.",
    ]
    return "\n".join(lines) + "\n"


def _provenance(quantized: Quantized) -> Iterator[tuple[str, str]]:
    job = quantized.job
    yield "original", f"`{job.model}`, SHA-256 of weights and configuration `{quantized.model_digest}`"
    yield (
        "scheme, method",
        f"{job.scheme}, {job.method}" + (f", groups of {job.group_size}" if job.group_size else ""),
    )
    if job.calibration is None:
        yield "calibration", "none: rounding to nearest reads no text"
    else:
        yield (
            "calibration",
            f"`{job.calibration.name}`: {quantized.texts} texts, {quantized.tokens} tokens, at most "
            f"{job.max_tokens} of each; SHA-256 `{job.calibration.digest}`",
        )
        if job.calibration.held_out:
            yield "kept from it", f"{len(job.calibration.held_out)} texts, for the gate alone"
    before, after = quantized.bytes_before, quantized.bytes_after
    yield "size", f"{after / _MIB:.1f} MiB of {before / _MIB:.1f} MiB ({after / max(before, 1):.0%})"
    yield (
        "memory",
        f"{quantized.peak_bytes / _MIB:.0f} MiB at the peak of quantizing"
        + (f", {quantized.offloaded_bytes / _MIB:.0f} MiB of weights on disk" if job.memory_bytes else ""),
    )
    layers = f"{quantized.layers} layers"
    if quantized.kept_layers:
        layers += f", {quantized.kept_layers} of them by a run before that was interrupted"
    yield "time", f"{quantized.seconds:.0f} s for {layers}"
    told = {"millrace": version("millrace"), **quantized.versions}
    yield "versions", ", ".join(f"{name} {number}" for name, number in told.items())


def command_of(job: QuantizeJob) -> str:
    """The command that makes the same again."""
    words = ["millrace quantize", job.model, f"--scheme {job.scheme}", f"--method {job.method}"]
    if job.calibration is not None:
        words += [f"--calibration {job.calibration.name}", f"--max-tokens {job.max_tokens}"]
    if job.scheme == "int4":
        words.append(f"--group-size {job.group_size}")
    return " ".join((*words, f"--out {job.out.name}"))


def judged(found: Comparison) -> str:
    """The gate's verdict and figures as a section of the card."""
    lines = [
        f"**{found.verdict}**, by `millrace gate` (suite `{found.suite.name}`, digest "
        f"`{found.suite_digest}`) with the original as baseline. Differences are how much better the "
        "original is; bounds hold whenever somebody looks.",
        "",
        "| layer | verdict | original | this | difference | bounds | questions |",
        "|---|---|---|---|---|---|---|",
        *map(_row, found.layers),
    ]
    notes = [f"{each.layer}: {each.note}." for each in found.layers if each.note]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _row(layer: LayerResult) -> str:
    name = layer.layer if layer.decides else f"{layer.layer} (told only)"
    return (
        f"| {name} | {report.told(layer)} | {layer.baseline:.3f} | {layer.candidate:.3f} "
        f"| {layer.difference:+.4f} | {layer.lower:+.3f} … {layer.upper:+.3f} | {layer.num_questions} |"
    )
