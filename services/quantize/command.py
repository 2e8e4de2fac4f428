"""`millrace quantize`: the command line."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from checkpoint.files import find
from checkpoint.known import known_models
from runtime.errors import ConfigError
from services.cli.options import flattened
from services.cli.verdicts import judging
from services.gate import report
from services.gate.cases import EXIT_STATUS
from services.gate.suite import Suite, check_cases, read_suite
from services.quantize.calibration import BUNDLED, CalibrationSet, CalibrationText, read_calibration
from services.quantize.choices import CALIBRATED, MethodName, SchemeName, check_choice
from services.supervisor import checkpoint
from services.supervisor.config import BUNDLED_MODEL

# They bring torch, which other commands do without.
if TYPE_CHECKING:
    from services.quantize.run import LayerProgress, Quantized, QuantizeJob

_notes = Console(stderr=True, highlight=False)
_CARD = "README.md"
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """What is made of which model."""

    model: Annotated[
        str,
        typer.Argument(
            help=f"Folder in Hugging Face format, GGUF file, hub id, or known name ({BUNDLED}, "
            f"{', '.join(known_models())})."
        ),
    ]
    scheme: Annotated[SchemeName, typer.Option(help="What weights, and perhaps inputs, become.")]
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder of the result; it must not be there yet.")
    ]
    method: Annotated[MethodName, typer.Option(help="How it is rounded; rtn is to nearest.")] = "rtn"
    calibration: Annotated[
        str,
        typer.Option(
            help=f"JSONL with text or messages, or plain text, for awq, gptq and smoothquant; {BUNDLED} for "
            "generated texts."
        ),
    ] = ""
    samples: Annotated[int, typer.Option(min=1, max=100_000, help="Texts that calibrate, at most.")] = 256
    max_tokens: Annotated[int, typer.Option(min=2, max=131_072, help="Tokens of each, at most.")] = 512
    group_size: Annotated[
        int | None,
        typer.Option(min=16, max=1024, help="Inputs that share a scale (int4); the largest that fits."),
    ] = None
    memory_gib: Annotated[
        float, typer.Option(min=0, help="Most memory of weights; what is above lies on disk. 0 is no bound.")
    ] = 0
    threads: Annotated[int, typer.Option(min=0, max=1024, help="Threads that compute; 0 is torch's own.")] = 0
    gate: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="suite.toml by which the result is judged."),
    ] = None
    no_gate: Annotated[bool, typer.Option("--no-gate", help="Do not judge; the card says so.")] = False


@flattened
def quantize(options: QuantizeOptions) -> None:
    """Make a checkpoint smaller, and judge whether it is still as good.

    The result is a folder that Millrace, transformers and, of most schemes, vLLM load; its README.md has the
    verdict. Ends as `millrace gate` does: 0 if it is not worse, 1 if it is, 2 where something is wrong, 3
    when more cases are needed. Interrupted, the same command goes on after the last whole layer.
    """
    console = Console(highlight=False)
    with judging(_notes):
        status = _quantize(options, console)
    raise typer.Exit(status)


def _quantize(options: QuantizeOptions, console: Console) -> int:
    job, suite, held_out = _checked(options)
    from services.quantize import card
    from services.quantize.run import compress

    def write_card(quantized: Quantized, folder: Path) -> None:
        quality = card.NO_GATE if options.no_gate else card.PENDING
        (folder / _CARD).write_text(card.card(quantized, quality), encoding="utf-8")

    with _progress() as advance:
        quantized = compress(job, write_card, _tell, advance)
    console.print(f"{job.out}: {quantized.bytes_after / 2**20:.1f} MiB", markup=False, soft_wrap=True)
    return 0 if options.no_gate else _judge(options, quantized, suite or held_out, console)


def _checked(options: QuantizeOptions) -> tuple[QuantizeJob, Suite | None, Sequence[CalibrationText]]:
    """The job, the suite that was named, and texts for the gate; whatever is wrong is refused before anything
    is loaded.
    """
    if options.gate is not None and options.no_gate:
        raise ConfigError("--gate and --no-gate exclude each other; leave one out")
    check_choice(options.scheme, options.method, options.calibration)
    suite = read_suite(options.gate) if options.gate is not None else None
    if suite is not None:
        check_cases(suite, options.gate)
    calibration, held_out = _calibration(options)
    from services.quantize.kept import check_out
    from services.quantize.run import QuantizeJob, check_checkpoint, choose_group

    check_out(options.out)
    named = str(BUNDLED_MODEL) if options.model == BUNDLED else options.model
    found = find(str(checkpoint.resolve(named)))
    check_checkpoint(found)
    job = QuantizeJob(
        model=options.model,
        checkpoint=found,
        scheme=options.scheme,
        method=options.method,
        group_size=choose_group(found, options.scheme, options.group_size),
        out=options.out,
        calibration=calibration,
        max_tokens=options.max_tokens,
        memory_bytes=int(options.memory_gib * _GIB),
        threads=options.threads,
    )
    return job, suite, held_out


def _calibration(options: QuantizeOptions) -> tuple[CalibrationSet | None, Sequence[CalibrationText]]:
    """What calibrates, and what only the gate sees."""
    if not options.calibration:
        return None, ()
    calibrates = options.method in CALIBRATED
    divided = calibrates and not options.no_gate and options.gate is None
    found = read_calibration(options.calibration, divided=divided, most=options.samples)
    if calibrates:
        return found, found.held_out
    _tell("rounding to nearest reads no text: --calibration is for the gate alone")
    return None, () if found.name == BUNDLED else found.texts


def _judge(
    options: QuantizeOptions, quantized: Quantized, by: Suite | Sequence[CalibrationText], console: Console
) -> int:
    """Judges by a suite, or by the default one on some texts; the exit status."""
    from services.quantize import card
    from services.quantize.judge import default_suite, judge

    job = quantized.job
    with tempfile.TemporaryDirectory(prefix="millrace-quantize-") as place:
        folder = Path(place)
        suite = by if isinstance(by, Suite) else default_suite(by, folder)
        suite_folder = options.gate.parent if options.gate is not None else folder
        _tell("judging it beside the original")
        try:
            found = judge(str(job.checkpoint), job.out, suite, suite_folder)
        except ConfigError as error:
            text = card.card(quantized, f"Nothing was measured: the gate could not compare them: {error}.")
            report.write(job.out / _CARD, text.encode())
            raise
        except KeyboardInterrupt:
            _notes.print("interrupted; the result is whole, and `millrace gate` judges it", markup=False)
            return 130
    report.write(job.out / _CARD, card.card(quantized, card.judged(found)).encode())
    report.show(found, console)
    return EXIT_STATUS[found.verdict]


def _tell(text: str) -> None:
    _notes.print(text, style="dim", markup=False, soft_wrap=True)


@contextmanager
def _progress() -> Iterator[LayerShown]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_notes, transient=True) as progress:
        yield LayerShown(progress)


class LayerShown:
    """Shows each layer that is done: as a bar on a terminal, as lines elsewhere."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("layers", total=None)

    def __call__(self, layer: LayerProgress) -> None:
        left = "" if layer.seconds_left is None else f", {layer.seconds_left:.0f} s left"
        text = f"layer {layer.done} of {layer.total}{left}" + (" (done before)" if layer.kept else "")
        if _notes.is_terminal:
            self._progress.update(self._task, completed=layer.done, total=layer.total, description=text)
        else:
            _tell(text)
